"""Trains one network on one device: the Python sides of the GPU benchmarks."""
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import goddpbench

args = json.loads(sys.argv[1])
device, n = torch.device(args["Device"]), args["Batch"]
torch.manual_seed(0)
if args["Net"] == "toy":
    net, x, y, loss_fn = nn.Linear(20, 1), torch.empty(n, 20).normal_(), torch.empty(n, 1).normal_(), F.mse_loss
elif args["Net"] == "mlp":
    net = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    x, y, loss_fn = torch.empty(n, 784).normal_(), torch.arange(n) * 7 % 10, F.cross_entropy
else:
    net = getattr(torchvision.models, args["Net"])()
    x, y, loss_fn = torch.empty(n, 3, 32, 32).normal_(), torch.arange(n) * 7 % 1000, F.cross_entropy
net, x, y = net.to(device), x.to(device), y.to(device)
if args["ChannelsLast"]:
    net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
opt = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
ranked = "RANK" in os.environ
if ranked:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    net = DDP(net)
if args["Compile"]:
    net = torch.compile(net)


def step():
    opt.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args["BF16"]):
        loss = loss_fn(net(x), y)
    loss.backward()
    opt.step()
    return loss


def handle(request):
    def work():
        for _ in range(request["n"]):
            loss = step()
        loss.item()  # waits for the device

    answer = goddpbench.measure(request["n"], work)
    return answer | {"samples": [n / answer["seconds"][0]]}


goddpbench.serve(handle, {"first": [step().item()]})
if ranked:
    dist.destroy_process_group()
