"""The Python side of syncbn_models_test.go.

usage: norms.py make <directory>    saves TorchScript models
       norms.py check <directory>   loads what Go saved, prints its state, and trains it
"""
import sys

import torch
from torch import nn


class Own(nn.BatchNorm2d):
    """A class derived from PyTorch's: TorchScript keeps its own name."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.cumulative = nn.BatchNorm2d(4, momentum=None)
        self.plain = nn.BatchNorm2d(4, affine=False)
        self.own = Own(4)
        self.stateless = nn.BatchNorm2d(4, track_running_stats=False)
        self.instance = nn.InstanceNorm2d(4, track_running_stats=True)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        x = torch.relu(self.bn(self.conv(x)))
        x = self.own(self.plain(self.cumulative(x) * 1.5))
        x = self.instance(self.stateless(torch.tanh(x)))
        return self.fc(x[:, :, 0, 0] + x.mean([2, 3]))


what, folder = sys.argv[1:]
if what == "make":
    torch.manual_seed(4)
    torch.jit.script(Net().double()).save(f"{folder}/net.pt")
    bare = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False, track_running_stats=False))
    torch.jit.script(bare).save(f"{folder}/bare.pt")
else:
    net = torch.jit.load(f"{folder}/net.pt")
    for name, t in net.state_dict().items():
        print(name, f"{t.double().sum().item():.17g}")
    before = net.fc.weight.clone()
    for p in net.parameters():
        p.requires_grad_()
    net.train()
    net(torch.randn(4, 3, 6, 6, dtype=torch.float64)).square().sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert not torch.equal(before, net.fc.weight)
    print("trained")
