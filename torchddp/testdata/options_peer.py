"""Python ranks of a mixed group, with the same scenarios as live_options_test.go.

usage: options_peer.py rank world port
Each scenario prints lines "scenario key bytes", which must be equal on all ranks, Go's too.
"""
import datetime
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

rank, world, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=120)
)


def numbers(*shape, seed=0):
    n = 1
    for s in shape:
        n *= s
    i = torch.arange(n)
    return (((i * 37 + 11 + 29 * seed) % 64 - 32).to(torch.float32) / 37).reshape(shape)


def show(scenario, key, t):
    if t is None:
        print(scenario, key, "None")
        return
    t = t.detach()
    if t.is_sparse:
        t = t.coalesce().to_dense()
    if t.is_complex():
        t = torch.view_as_real(t)
    print(scenario, key, t.contiguous().numpy().tobytes().hex())


def show_all(scenario, key, t):
    """What every rank has."""
    all = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(all, t)
    show(scenario, key, torch.stack(all))


class Net(nn.Module):
    """Three layers as plain tensors, of which a forward names those that it uses."""

    def __init__(self, buffers=False):
        super().__init__()
        self.a = nn.Parameter(numbers(6, 4, seed=1 + rank))
        self.b = nn.Parameter(numbers(4, 3, seed=2 + rank))
        self.c = nn.Parameter(numbers(4, 3, seed=3 + rank))
        self.d = nn.Parameter(numbers(5, seed=4 + rank))
        if buffers:
            self.register_buffer("seen", torch.full((2,), 10.0 + rank))

    def forward(self, x, use):
        h = x.matmul(self.a).tanh()
        y = h.matmul(self.b) if "b" in use else 0
        if "c" in use:
            y = y + h.matmul(self.c)
        if "d" in use:
            y = y + self.d.sum()
        if "2" in use:  # b once more
            y = y + h.tanh().matmul(self.b)
        return y


def batch(k):
    return numbers(7, 6, seed=100 + 10 * k + rank)


def step(ddp, k, use):
    ddp(batch(k), use).pow(2).mean().backward()


def grads(scenario, net, k):
    for n, p in net.named_parameters():
        show(scenario, f"{k}.{n}.grad", p.grad)


def zero(net):
    for p in net.parameters():
        p.grad = None


def descend(net):
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.125)


def train(scenario, uses, options, net=None, hook=None):
    net = net or Net()
    ddp = DDP(net, **options)
    if hook:
        ddp.register_comm_hook(None, hook)
    for k, use in enumerate(uses):
        zero(net)
        step(ddp, k, use)
        grads(scenario, net, k)
        descend(net)
    for n, p in net.state_dict().items():
        show(scenario, n, p)


def no_sync(scenario, view):
    net = Net()
    ddp = DDP(net, gradient_as_bucket_view=view)
    for k in range(9):
        if k % 3 == 0:
            zero(net)
        if k % 3 < 2:
            with ddp.no_sync():
                step(ddp, k, "bcd")
        else:
            step(ddp, k, "bcd")
            grads(scenario, net, k)
            descend(net)


def join(scenario, by_active):
    net = Net(buffers=True)
    ddp = DDP(net)
    with ddp.join(divide_by_initial_world_size=not by_active):
        for k in range(2 + 2 * rank):
            zero(net)
            step(ddp, k, "bcd")
            if k < 2:  # all ranks still train
                grads(scenario, net, k)
            descend(net)
            net.seen += 1 + rank
    for n, p in net.state_dict().items():
        show(scenario, n, p)


def buffers(scenario, broadcast):
    net = Net(buffers=True)
    ddp = DDP(net, broadcast_buffers=broadcast)
    for k in range(6):
        net.seen += 1 + rank
        zero(net)
        if k in (2, 3):  # the flag of a forward without gradients is the next one's
            with torch.no_grad():
                ddp(batch(k), "bcd")
        else:
            step(ddp, k, "bcd")
            grads(scenario, net, k)
            descend(net)
        show_all(scenario, f"{k}.seen", net.seen)


def ignore(scenario):
    net = Net(buffers=True)
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["c", ".c", "seen", ".seen"])
    ddp = DDP(net)
    net.c.data = numbers(4, 3, seed=5)  # as no broadcast makes it equal
    for k in range(3):
        zero(net)
        step(ddp, k, "bcd")
        for n, p in net.named_parameters():
            if n != "c":
                show(scenario, f"{k}.{n}.grad", p.grad)
    show_all(scenario, "seen", net.seen)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.table.weight.data = numbers(10, 4, seed=1 + rank)
        self.w = nn.Parameter(numbers(4, 2, seed=2 + rank))

    def forward(self, k):
        i = (torch.arange(6) * (3 + rank) + k) % 10
        return self.table(i).matmul(self.w)


def sparse(scenario, view):
    net = Sparse()
    ddp = DDP(net, gradient_as_bucket_view=view)
    for k in range(4):
        zero(net)
        ddp(k).pow(2).mean().backward()
        grads(scenario, net, k)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.z = nn.Parameter(torch.complex(numbers(6, 4, seed=1 + rank), numbers(6, 4, seed=2 + rank)))
        self.w = nn.Parameter(numbers(4, 2, seed=3 + rank))

    def forward(self, x):
        y = x.to(torch.complex64).matmul(self.z)
        return (y * y.conj()).real.matmul(self.w)


def complex_(scenario, view):
    net = Complex()
    ddp = DDP(net, gradient_as_bucket_view=view)
    for k in range(4):
        zero(net)
        ddp(batch(k)).mean().backward()
        grads(scenario, net, k)
        descend(net)


def by_rank(*uses):
    return [use if rank % 2 == 0 else use.translate(str.maketrans("bc", "cb")) for use in uses]


def fp16(state, bucket):
    return default_hooks.fp16_compress_hook(dist.group.WORLD, bucket)


def bf16(state, bucket):  # by its own name Python refuses it without NCCL
    return default_hooks.bf16_compress_hook(dist.group.WORLD, bucket)


for name, view in (("copy", False), ("view", True)):
    o = {"gradient_as_bucket_view": view}
    train(f"unused-{name}", by_rank("b", "b", "bc", "c", "bd"), {"find_unused_parameters": True, **o})
    train(f"static-{name}", ["bc2"] * 5, {"static_graph": True, **o})
    train(f"small-{name}", ["bcd"] * 4, {"bucket_cap_mb": 0.0001, **o})
    no_sync(f"no_sync-{name}", view)
    train(f"fp16-{name}", ["bcd"] * 4, o, hook=fp16)
    train(f"bf16-{name}", ["bcd"] * 4, o, hook=bf16)
    sparse(f"sparse-{name}", view)
    complex_(f"complex-{name}", view)
join("join-world", False)
join("join-active", True)
buffers("buffers-broadcast", True)
buffers("buffers-local", False)
ignore("ignore")
dist.barrier()
dist.destroy_process_group()
