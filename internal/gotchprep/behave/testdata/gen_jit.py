"""Makes the TorchScript modules that the tests run: python gen_jit.py. Needs torch 2.11."""
import os
from typing import Dict, List, Tuple

import torch


class Echo(torch.nn.Module):
    """Gives back one of each kind of value that TorchScript knows."""

    def forward(self, x: torch.Tensor, ints: List[int], flags: List[bool], word: str, factor: float):
        named: Dict[str, torch.Tensor] = {"twice": x * 2, "more": x + factor}
        pair: Tuple[torch.Tensor, torch.Tensor] = (x, x + 1)
        words: List[str] = [word, word + word]
        none: List[int] = []
        return pair, [i + 1 for i in ints], [not f for f in flags], word + "!", factor * 2, named, [x, x * 3, x * 4], words, none, [factor, 1.5]


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[2.0, 3.0]]))
        self.bias = torch.nn.Parameter(torch.tensor([0.5]))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


here = os.path.dirname(os.path.abspath(__file__))
torch.jit.script(Echo()).save(os.path.join(here, "echo.pt"))
torch.jit.script(Line()).save(os.path.join(here, "line.pt"))
