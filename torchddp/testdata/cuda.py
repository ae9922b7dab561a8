"""Trains a small network with DDP, on one GPU or the CPU, and prints what rank 0 saw, as JSON: losses, and the state at the end.

usage: cuda.py cuda|cpu nccl|gloo WORLD PORT plain|sync|bf16      sync: SyncBatchNorm; bf16: the forward under autocast
"""
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def batch(rank, step, device):
    i = torch.arange(48)
    return (((i * 13 + rank * 7 + step * 5) % 19 - 9).float() / 7).reshape(8, 6).to(device)


def train(rank, device, backend, world, port, kind):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group(backend, rank=rank, world_size=world)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    if kind == "sync":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    ddp = DDP(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(5):
        opt.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=kind == "bf16"):
            out = ddp(batch(rank, step, device)).float()
            loss = (out * out).mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    if rank == 0:
        state = {k: v.double().flatten().tolist() for k, v in net.state_dict().items()}
        print(json.dumps({"losses": losses, "state": state}))
    dist.destroy_process_group()


if __name__ == "__main__":
    device, backend, world, port, kind = sys.argv[1:]
    mp.spawn(train, (device, backend, int(world), port, kind), int(world))
