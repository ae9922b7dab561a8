"""The Python side of bench/models: the same training step, driven by lines on standard input."""
import json
import resource
import sys
import time

import torch
import torchvision

o = json.loads(sys.argv[1])
torch.set_num_threads(o["Threads"])
torch.manual_seed(0)
device = torch.device(o["Device"])
net = getattr(torchvision.models, o["Net"])().to(device)
x = torch.empty(o["Batch"], 3, o["Size"], o["Size"]).normal_().to(device)
y = (torch.arange(o["Batch"]) * 7 % 1000).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
loss_fn = torch.nn.CrossEntropyLoss()
net.train()


def peak():
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"Base": before}), flush=True)
for line in sys.stdin:
    n = int(line)
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(n):
        opt.zero_grad()
        loss = loss_fn(net(x), y)
        loss.backward()
        opt.step()
    value = loss.item()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(json.dumps({"Seconds": seconds / n, "CPU": cpu / n, "Loss": value, "Peak": peak()}), flush=True)
