"""Loads a checkpoint of cmd/rl as Python would go on with it, and plays CartPole with its policy.

    python play.py rl.pt    prints iter_no and the mean return of 20 episodes
"""
import math
import random
import sys

import torch


class Policy(torch.nn.Module):  # as in PyTorch's reinforce.py, without its dropout
    def __init__(self, hidden):
        super().__init__()
        self.affine1 = torch.nn.Linear(4, hidden)
        self.affine2 = torch.nn.Linear(hidden, 2)

    def forward(self, x):
        return self.affine2(torch.relu(self.affine1(x)))


def load(path, map_location=None):
    state = torch.load(path, map_location=map_location, weights_only=True)
    assert list(state) == ["iter_no", "model", "optimizer"], list(state)
    policy = Policy(len(state["model"]["affine1.bias"]))
    policy.load_state_dict(state["model"])
    optimizer = torch.optim.Adam(policy.parameters(), lr=1)
    optimizer.load_state_dict(state["optimizer"])
    return state["iter_no"], policy, optimizer


def episode(policy, draw):
    x, v, a, w = (draw.uniform(-0.05, 0.05) for _ in range(4))
    for step in range(500):
        with torch.no_grad():
            left, right = policy(torch.tensor([x, v, a, w])).softmax(0).tolist()
        push = 10.0 if draw.random() < right else -10.0
        temp = (push + 0.05 * w * w * math.sin(a)) / 1.1
        turn = (9.8 * math.sin(a) - math.cos(a) * temp) / (0.5 * (4 / 3 - 0.1 * math.cos(a) ** 2 / 1.1))
        move = temp - 0.05 * turn * math.cos(a) / 1.1
        x, v, a, w = x + 0.02 * v, v + 0.02 * move, a + 0.02 * w, w + 0.02 * turn
        if abs(x) > 2.4 or abs(a) > math.radians(12):
            return step + 1
    return 500


if __name__ == "__main__":
    torch.set_num_threads(1)
    iter_no, policy, optimizer = load(sys.argv[1], {"cuda:0": "cpu"})
    optimizer.zero_grad()
    policy(torch.ones(3, 4)).sum().backward()
    draw = random.Random(1)
    print(iter_no, sum(episode(policy, draw) for _ in range(20)) / 20)
    optimizer.step()
