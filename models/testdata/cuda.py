"""ResNet-18 on a GPU, as JSON for the Go test.  usage: cuda.py float32|bfloat16 contiguous|channels_last"""
import json
import sys

import torch
import torchvision

dtype, layout = sys.argv[1:]
torch.manual_seed(3)
net = torchvision.models.resnet18(num_classes=10)
x, y = torch.empty(8, 3, 32, 32).normal_().cuda(), torch.arange(8).cuda()
net = net.cuda()
if layout == "channels_last":
    net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
losses = []
for _ in range(3):
    opt.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        out = net(x)
        loss = torch.nn.functional.cross_entropy(out, y)
    loss.backward()
    opt.step()
    losses.append(loss.item())
print(json.dumps({"dtype": str(out.dtype), "losses": losses}))
