"""The Python side of script_test.go.

    script.py make DIR            saves TorchScript modules and prints what they are and how they train
    script.py check DIR           loads what Go saved and prints what it is
"""
import hashlib
import json
import sys
from collections import OrderedDict
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch
import torchvision
from torch import Tensor, nn

LR = 0.05


class Mixed(nn.Module):
    """Its own parameter and buffer come after its children were made, one weight is shared, one layer is there twice."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(6, 6)
        self.bn = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.zeros(6))
        self.other = nn.Linear(6, 6)
        self.other.weight = self.child.weight
        self.again = self.child

    def forward(self, x):
        x = torch.relu(self.bn(self.child(x)))
        x = torch.relu(self.other(x) * self.scale + self.shift)
        return self.again(x)


class Out(NamedTuple):
    y: Tensor
    n: int


class Many(nn.Module):
    """Several inputs and outputs, and a second method."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(
        self,
        x: Tensor,
        more: List[Tensor],
        named: Dict[str, Tensor],
        pair: Tuple[Tensor, int],
        scale: float,
        twice: bool,
        name: str,
        extra: Optional[Tensor],
        ints: List[int],
        unused: int = 0,
    ) -> Tuple[Tensor, Dict[str, Tensor], List[Tensor], Out, Optional[Tensor], str, float, bool, List[int]]:
        y = self.fc(x)
        for m in more:
            y = y + self.fc(m)
        for k in named.keys():
            y = y + named[k]
        y = (y + pair[0] * pair[1]) * scale
        if twice:
            y = y * 2
        if extra is not None:
            y = y + extra
        out: Dict[str, Tensor] = {"b": y, "a": y + 1}
        return y, out, [y, y * 3], Out(y, len(ints)), extra, name + "!", scale, twice, ints

    @torch.jit.export
    def double(self, x: Tensor) -> Tensor:
        return x * 2


def sha(t):
    t = t.detach().contiguous().reshape(-1)
    return hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def tree(m):
    return {
        "parameters": [n for n, _ in m.named_parameters()],
        "buffers": [n for n, _ in m.named_buffers()],
        "state": list(m.state_dict()),
        "versions": {n: v["version"] for n, v in m.state_dict()._metadata.items()},
        "modules": [n for n, _ in m.named_modules()],
        "repr": repr(m),
        "values": [sha(t) for t in m.state_dict().values()],
    }


def train(m, x, y, steps):
    losses = []
    m.train()
    for _ in range(steps):
        m.zero_grad()
        loss = nn.functional.cross_entropy(m(x), y)
        loss.backward()
        with torch.no_grad():
            for p in m.parameters():
                p.add_(p.grad, alpha=-LR)
        losses.append(loss.item())
    m.eval()
    with torch.no_grad():
        out = m(x)
    return losses, sha(out)


def data(shape, classes):
    n = 1
    for d in shape:
        n *= d
    x = ((torch.arange(n) * 37 % 101).float() / 50 - 1).reshape(shape)
    return x, torch.arange(shape[0]) * 7 % classes


def models():
    torch.manual_seed(1)
    resnet = torchvision.models.resnet18(num_classes=5)
    yield "mixed", torch.jit.script(Mixed()), (8, 6), 6
    yield "resnet", torch.jit.script(resnet), (2, 3, 32, 32), 5
    x, _ = data((4, 6), 6)
    yield "traced", torch.jit.trace(nn.Sequential(OrderedDict([("a", nn.Linear(6, 8)), ("b", nn.GELU()), ("c", nn.Linear(8, 3))])), x), (8, 6), 3


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    what, folder = sys.argv[1:]
    result = {}
    if what == "make":
        for name, m, shape, classes in models():
            m.eval()
            m.save(f"{folder}/{name}.pt")
            # train what a reader gets, in both languages
            m = torch.jit.load(f"{folder}/{name}.pt")
            result[name] = tree(m)
            x, y = data(shape, classes)
            result[name]["losses"], result[name]["eval"] = train(m, x, y, 20)
            result[name]["final"] = [sha(t) for t in m.state_dict().values()]
        torch.jit.script(Many()).save(f"{folder}/many.pt")
        frozen = torch.jit.freeze(torch.jit.script(Mixed()).eval())
        frozen.save(f"{folder}/frozen.pt")
    else:
        for name, _, shape, classes in models():
            m = torch.jit.load(f"{folder}/{name}.pt")
            result[name] = tree(m)
            x, _ = data(shape, classes)
            m.eval()
            with torch.no_grad():
                result[name]["eval"] = sha(m(x))
            # and it trains on in Python
            _, y = data(shape, classes)
            result[name]["losses"], _ = train(m, x, y, 1)
    json.dump(result, sys.stdout)


main()
