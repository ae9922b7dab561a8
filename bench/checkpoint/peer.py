"""Python's side of the checkpoint benchmark.

peer.py FILE THREADS: writes FILE, then obeys commands on standard input: "save PATH", "load PATH" or "mmap PATH". The
answer is the seconds it took.
peer.py once WHAT FILE THREADS: prints the seconds that one load takes in a fresh process, after a tiny one.
"""
import gc
import sys
import time

import torch

if sys.argv[1] == "once":
    import os
    import tempfile

    torch.set_num_threads(int(sys.argv[4]))
    with tempfile.TemporaryDirectory() as tiny:
        torch.save({"x": torch.ones(3)}, os.path.join(tiny, "x.pt"))
        torch.load(os.path.join(tiny, "x.pt"), mmap=sys.argv[2] == "mmap")
    start = time.perf_counter()
    out = torch.load(sys.argv[3], mmap=sys.argv[2] == "mmap")
    print(time.perf_counter() - start)
    sys.exit()

import torchvision

torch.manual_seed(0)
torch.set_num_threads(int(sys.argv[2]))
model = torchvision.models.resnet50()
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for p in model.parameters():
    p.grad = torch.ones_like(p)
opt.step()
state = {"iter_no": 1, "model": model.state_dict(), "optimizer": opt.state_dict()}
torch.save(state, sys.argv[1])
for p in model.parameters():
    p.grad = None


print("ready", flush=True)
for line in sys.stdin:
    what, path = line.split()
    gc.collect()
    start = time.perf_counter()
    if what == "save":
        torch.save(state, path)
        out = None
    else:
        out = torch.load(path, mmap=what == "mmap")
    took = time.perf_counter() - start
    del out
    print(took, flush=True)
