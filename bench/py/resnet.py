"""Trains a residual network of torchvision's, as a rank with DDP or by itself."""
import json
import os
import sys

import torch
import torch.distributed as dist
import torchvision
from torch.nn.parallel import DistributedDataParallel as DDP

import goddpbench

args = json.loads(sys.argv[1])
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
torch.manual_seed(0)
net = getattr(torchvision.models, args["Net"])()
n = args["Batch"]
x = torch.empty(n, 3, 32, 32).normal_()
y = torch.arange(n) * 7 % 1000
opt = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
loss_fn = torch.nn.CrossEntropyLoss()
net.train()
ranked = "RANK" in os.environ
if ranked:
    dist.init_process_group("gloo")
    net = DDP(net)


def handle(request):
    value = 0.0

    def work():
        nonlocal value
        for _ in range(request["n"]):
            opt.zero_grad()
            loss = loss_fn(net(x), y)
            loss.backward()
            opt.step()
        value = loss.item()

    answer = goddpbench.measure(request["n"], work)
    return answer | {"loss": [value], "peak": [goddpbench.peak_memory()], "images": [n / answer["seconds"][0]]}


goddpbench.serve(handle)
if ranked:
    dist.destroy_process_group()
