"""Makes the file, if it is not there, and saves and loads it."""
import gc
import json
import os
import sys
import tempfile
import time

import torch

import goddpbench

source = json.loads(sys.argv[1])["Source"]
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
state = None


def model_state():
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.resnet50()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    for p in model.parameters():
        p.grad = None
    return {"iter_no": 1, "model": model.state_dict(), "optimizer": opt.state_dict()}


if not os.path.exists(source):
    state = model_state()
    torch.save(state, source)

# A tiny file first, so that what is measured is no first use.
with tempfile.TemporaryDirectory() as tiny:
    torch.save({"x": torch.ones(3)}, os.path.join(tiny, "x.pt"))
    torch.load(os.path.join(tiny, "x.pt"))
    torch.load(os.path.join(tiny, "x.pt"), mmap=True)


def handle(request):
    global state
    what, path = request["do"], request["path"]
    if what == "save" and state is None:
        state = model_state()
    gc.collect()
    begin = time.perf_counter()
    if what == "save":
        torch.save(state, path)
        out = None
    else:
        out = torch.load(path, mmap=what == "mmap")
    seconds = time.perf_counter() - begin
    del out
    return {"seconds": [seconds]}


goddpbench.serve(handle)
