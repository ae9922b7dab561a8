"""DDP around a model of many small parameters, and of batch norms that are not run."""
import ctypes
import json
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import goddpbench

args = json.loads(sys.argv[1])
plain = ctypes.CDLL(args["Plain"])  # see package plain
for f in (plain.layer_new, plain.layer_step, plain.layer_free):
    f.restype = ctypes.c_char_p
plain.layer_parameter.restype = ctypes.c_void_p


class Many(torch.nn.Module):
    def __init__(self, n, norms):
        super().__init__()
        self.twins = []  # made at the same time, so that they lie in memory as these do
        for i in range(n):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.ones(1)))
            self.twins.append(plain.layer_parameter())
        self.twins += [plain.layer_parameter() for _ in range(2 * norms)]
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(1) for _ in range(norms))
        self.list = list(self.parameters())

    def forward(self):
        return torch.cat(self.list).sum()


torch.set_num_threads(1)
dist.init_process_group("gloo")
model = Many(args["Params"], args["Norms"])
ddp = DDP(model)
layer = ctypes.c_void_p()


def check(error):
    if error:
        raise RuntimeError(error.decode())


twins = (ctypes.c_void_p * len(model.twins))(*model.twins)
check(plain.layer_new(twins, len(twins), args["Norms"], ctypes.byref(layer)))


def handle(request):
    n = request["n"]
    ours = theirs = 0.0
    for _ in range(n):
        begin = time.perf_counter()
        for p in model.list:
            p.grad = None
        ddp().backward()
        middle = time.perf_counter()
        check(plain.layer_step(layer))
        ours, theirs = ours + middle - begin, theirs + time.perf_counter() - middle
    return {"seconds": [ours / n], "plain": [theirs / n]}


goddpbench.serve(handle)
check(plain.layer_free(layer))
dist.destroy_process_group()
