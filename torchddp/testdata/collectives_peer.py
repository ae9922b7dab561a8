"""One Python rank of a mixed group: the same collectives, in the same order, as mixedCollectives in peer_test.go.

Usage: collectives_peer.py RANK WORLD PORT. Every result is compared with what it has to be; "OK" means all were right.
"""
import datetime
import sys
import warnings

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")
rank, world, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
                        timeout=datetime.timedelta(seconds=60))


def same(what, got, want):
    got = got.tolist() if isinstance(got, torch.Tensor) else got
    assert got == want, f"{what}: got {got}, want {want}"


def collectives(g, n, me):
    t = lambda *v: torch.tensor(v, dtype=torch.float32)
    for op, want in [(dist.ReduceOp.SUM, n * (n + 1) / 2), (dist.ReduceOp.MAX, n), (dist.ReduceOp.AVG, (n + 1) / 2)]:
        x = t(me + 1)
        dist.all_reduce(x, op, group=g)
        same("all_reduce", x, [want])
    x = t(me, 5)
    dist.broadcast(x, group_src=n - 1, group=g)
    same("broadcast", x, [n - 1, 5])
    x = t(me + 1)
    dist.reduce(x, group_dst=0, group=g)
    if me == 0:
        same("reduce", x, [n * (n + 1) / 2])
    out = [t(0) for _ in range(n)]
    dist.all_gather(out, t(10 * me), group=g)
    same("all_gather", [o.item() for o in out], [10 * i for i in range(n)])
    x = t(*[0] * (2 * n))
    dist.all_gather_into_tensor(x, t(me, me + 1), group=g)
    same("all_gather_into_tensor", x, [v for i in range(n) for v in (i, i + 1)])
    out = [t(0) for _ in range(n)] if me == 0 else None
    dist.gather(t(me), out, group_dst=0, group=g)
    if me == 0:
        same("gather", [o.item() for o in out], list(range(n)))
    x = t(0)
    dist.scatter(x, [t(100 + i) for i in range(n)] if me == n - 1 else None, group_src=n - 1, group=g)
    same("scatter", x, [100 + me])
    x = t(0)
    dist.reduce_scatter_tensor(x, t(*[me + i for i in range(n)]), group=g)
    same("reduce_scatter_tensor", x, [n * (n - 1) / 2 + n * me])
    x = t(0)
    dist.reduce_scatter(x, [t(me + i) for i in range(n)], group=g)
    same("reduce_scatter", x, [n * (n - 1) / 2 + n * me])
    # Rank i sends i + j + 1 numbers to rank j.
    x = t(*[0] * sum(i + me + 1 for i in range(n)))
    dist.all_to_all_single(x, t(*[10 * me + j for j in range(n) for _ in range(me + j + 1)]),
                           [i + me + 1 for i in range(n)], [me + j + 1 for j in range(n)], group=g)
    same("all_to_all_single", x, [10 * i + me for i in range(n) for _ in range(i + me + 1)])
    pair = [t(me), t(me, me)]
    dist.all_reduce_coalesced(pair, group=g)
    same("all_reduce_coalesced", [p.tolist() for p in pair], [[n * (n - 1) / 2], [n * (n - 1) / 2] * 2])
    x = torch.tensor([complex(me, 1)])
    dist.all_reduce(x, group=g)
    same("all_reduce of complex numbers", x, [complex(n * (n - 1) / 2, n)])
    after, before = (me + 1) % n, (me - 1) % n
    x = t(0)
    w = dist.isend(t(me), group_dst=after, group=g, tag=3)
    dist.recv(x, group_src=before, group=g, tag=3)
    w.wait()
    same("send and recv", x, [before])
    x = t(0)
    for w in dist.batch_isend_irecv([dist.P2POp(dist.isend, t(me + 7), group=g, group_peer=after),
                                     dist.P2POp(dist.irecv, x, group=g, group_peer=before)]):
        w.wait()
    same("batch_isend_irecv", x, [before + 7])
    w = dist.barrier(group=g, async_op=True)
    w.wait()


def value(r):
    return {"rank": r, "name": "x" * r, "list": [r, 0.5, None, True], "bytes": b"\x00\xff", "inner": {"k": -1}}


def objects(g, n, me):
    out = [None] * n
    dist.all_gather_object(out, value(me), group=g)
    same("all_gather_object", out, [value(i) for i in range(n)])
    out = [None] * n if me == 0 else None
    dist.gather_object(value(me), out, group_dst=0, group=g)
    if me == 0:
        same("gather_object", out, [value(i) for i in range(n)])
    for src in range(n):
        out = [value(me), value(me + 1)]
        dist.broadcast_object_list(out, group_src=src, group=g)
        same("broadcast_object_list", out, [value(src), value(src + 1)])
        out = [None]
        dist.scatter_object_list(out, [value(10 * src + i) for i in range(n)] if me == src else None, group_src=src, group=g)
        same("scatter_object_list", out, [value(10 * src + me)])
    out = [None, None]
    if me == 0:
        dist.send_object_list([value(1), (1, "two")], group_dst=1, group=g)
        dist.recv_object_list(out, group_src=1, group=g)
        same("recv_object_list", out, [value(2), [1, "two"]])
    elif me == 1:
        dist.recv_object_list(out, group_src=0, group=g)
        # A Go rank sends a list: Go has no tuples.
        same("recv_object_list", [out[0], list(out[1])], [value(1), [1, "two"]])
        dist.send_object_list([value(2), [1, "two"]], group_dst=0, group=g)


collectives(None, world, rank)
objects(None, world, rank)
# Groups: all ranks, the last two in the same order, and one that its members alone make.
every = dist.new_group()
collectives(every, world, rank)
local = dist.new_group(list(range(world)), use_local_synchronization=True)
collectives(local, world, rank)
ranks = [world - 1, world - 2]
part = dist.new_group(ranks)
if rank in ranks:
    collectives(part, 2, rank - (world - 2))
    objects(part, 2, rank - (world - 2))
dist.monitored_barrier()
dist.barrier()
dist.destroy_process_group()
print("OK")
