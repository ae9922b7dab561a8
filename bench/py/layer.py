"""DDP around a model of many small parameters, and of batch norms that are not run."""
import json
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import goddpbench


class Many(torch.nn.Module):
    def __init__(self, n, norms):
        super().__init__()
        for i in range(n):
            self.register_parameter(f"p{i}", torch.nn.Parameter(torch.ones(1)))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm2d(1) for _ in range(norms))
        self.list = list(self.parameters())

    def forward(self):
        return torch.cat(self.list).sum()


torch.set_num_threads(1)
dist.init_process_group("gloo")
args = json.loads(sys.argv[1])
model = Many(args["Params"], args["Norms"])
ddp = DDP(model)


def handle(request):
    n = request["n"]

    def work():
        for _ in range(n):
            for p in model.list:
                p.grad = None
            ddp().backward()

    return goddpbench.measure(n, work)


goddpbench.serve(handle)
dist.destroy_process_group()
