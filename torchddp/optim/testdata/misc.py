"""Clipping, averages and steps inside backward in Python, as JSON for the Go test. usage: misc.py <directory>"""
import json
import os
import sys

import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim import swa_utils


def numbers(*shape, dtype=torch.float32):
    n = 1
    for s in shape:
        n *= s
    i = torch.arange(n)
    return (((i * 37 + 11) % 64 - 32).to(torch.float64) / 16).to(dtype).reshape(shape)


def with_grads():
    params = [numbers(7, 3), numbers(5, dtype=torch.float64), numbers(40, 10), numbers(3)]
    for i, p in enumerate(params[:3]):
        p.requires_grad_()
        p.grad = numbers(*p.shape, dtype=p.dtype) * (i + 1)
    return params


def clip(f):
    params = with_grads()
    total = f(params)
    return [None if total is None else total.item(), [p.grad.flatten().tolist() for p in params if p.grad is not None]]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(numbers(4, 3))
        self.register_buffer("mean", numbers(3))
        self.register_buffer("count", torch.tensor(0))


def average(**kw):
    net = Net()
    avg = swa_utils.AveragedModel(net, **kw)
    out = []
    for i in range(20):
        with torch.no_grad():
            net.w.mul_(0.9).add_(0.01 * i)
            net.mean.mul_(1.1)
            net.count += 1
        avg.update_parameters(net)
        out.append([avg.module.w.flatten().tolist(), avg.module.mean.tolist(), avg.module.count.item(), avg.n_averaged.item()])
    return out


def in_backward():
    a, b = numbers(6, 4).requires_grad_(), numbers(4, 2).requires_grad_()
    _apply_optimizer_in_backward(torch.optim.SGD, [a, b], {"lr": 0.05, "momentum": 0.9})
    out = []
    for _ in range(10):
        y = a.matmul(b)
        (y * y).sum().mul(0.01).backward()
        out.append([a.flatten().tolist(), b.flatten().tolist()])
    assert a.grad is None
    return out


def sparse(make):
    table, dense = numbers(8, 3).requires_grad_(), numbers(3).requires_grad_()
    opt = make([table, dense])
    out = []
    for i in range(10):
        opt.zero_grad()
        rows = torch.nn.functional.embedding(torch.tensor([i % 8, 3, (i * 5) % 8, 3]), table, sparse=True)
        (rows * dense).pow(2).sum().mul(0.1).backward()
        assert table.grad.is_sparse
        opt.step()
        out.append([table.flatten().tolist(), dense.flatten().tolist()])
    return out


os.chdir(sys.argv[1])
clips = torch.nn.utils
out = {
    "clip": {
        "norm": clip(lambda p: clips.clip_grad_norm_(p, 1.5)),
        "norm-loop": clip(lambda p: clips.clip_grad_norm_(p, 1.5, foreach=False)),
        "norm-inf": clip(lambda p: clips.clip_grad_norm_(p, 0.7, norm_type=float("inf"))),
        "norm-1": clip(lambda p: clips.clip_grad_norm_(p, 3.0, norm_type=1)),
        "norm-large": clip(lambda p: clips.clip_grad_norm_(p, 1e6)),
        "value": clip(lambda p: clips.clip_grad_value_(p, 0.4)),
    },
    "average": {
        "ema": average(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
        "ema-buffers": average(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True),
        "swa": average(),
        "swa-buffers": average(use_buffers=True),
    },
    "in_backward": in_backward(),
    "sparse": {
        "sgd": sparse(lambda p: torch.optim.SGD(p, lr=0.1)),
        "sgd-foreach": sparse(lambda p: torch.optim.SGD(p, lr=0.1, foreach=True)),
        "sgd-momentum": sparse(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        "adagrad": sparse(lambda p: torch.optim.Adagrad(p, lr=0.1)),
    },
}
with open("misc.json", "w") as f:
    json.dump(out, f)
