"""Runs Python's learning rate schedulers for the Go test.

usage: schedules.py <directory> run      writes the rates of every step, and the state after SAVE steps
       schedules.py <directory> resume   continues from the states that Go saved
"""
import json
import os
import sys

import torch
from torch.optim import SGD, Adam
from torch.optim import lr_scheduler as L

STEPS, SAVE = 150, 60


def optimizer(adam=False):
    p = [torch.zeros(2, requires_grad=True) for _ in range(3)]
    groups = [{"params": p[:1]}, {"params": p[1:], "lr": 0.03}]
    if adam:
        return Adam(groups, lr=0.1)
    return SGD(groups, lr=0.1, momentum=0.9)


def large_batch(o):
    k = 2048 / 256
    for g in o.param_groups:
        g["lr"] *= k
    warm = L.LinearLR(o, start_factor=1 / k, end_factor=1.0, total_iters=30)
    return L.SequentialLR(o, [warm, L.CosineAnnealingLR(o, T_max=90)], milestones=[30])


MAKE = {
    "lambda": lambda o: L.LambdaLR(o, [lambda e: 0.95**e, lambda e: 1 / (1 + e)]),
    "step": lambda o: L.StepLR(o, 7, 0.7),
    "multistep": lambda o: L.MultiStepLR(o, [80, 30, 30, 100], 0.3),
    "constant": lambda o: L.ConstantLR(o, 0.3, 20),
    "linear": lambda o: L.LinearLR(o, 0.1, 0.9, 70),
    "exponential": lambda o: L.ExponentialLR(o, 0.97),
    "polynomial": lambda o: L.PolynomialLR(o, 120, 0.9),
    "cosine": lambda o: L.CosineAnnealingLR(o, 50, 0.001),
    "restarts": lambda o: L.CosineAnnealingWarmRestarts(o, 11, 2, 0.0005),
    "onecycle": lambda o: L.OneCycleLR(o, [0.2, 0.5], total_steps=151),
    "onecycle-linear": lambda o: L.OneCycleLR(
        o, 0.3, total_steps=160, pct_start=0.25, anneal_strategy="linear", three_phase=True, div_factor=10.0, final_div_factor=100.0
    ),
    "onecycle-adam": lambda o: L.OneCycleLR(o, 0.3, total_steps=151),
    "plateau": lambda o: L.ReduceLROnPlateau(o, "min", factor=0.5, patience=3, cooldown=2, min_lr=0.001),
    "plateau-max": lambda o: L.ReduceLROnPlateau(o, "max", threshold=0.05, threshold_mode="abs", min_lr=[0.002, 0.01]),
    "sequential": lambda o: L.SequentialLR(
        o, [L.LinearLR(o, 0.1, 1.0, 20), L.StepLR(o, 10, 0.8), L.ExponentialLR(o, 0.9)], milestones=[20, 75]
    ),
    "sequential-restarts": lambda o: L.SequentialLR(
        o, [L.ConstantLR(o, 0.1, 15), L.CosineAnnealingWarmRestarts(o, 20)], milestones=[15]
    ),
    "chained": lambda o: L.ChainedScheduler([L.ConstantLR(o, 0.1, 20), L.ExponentialLR(o, 0.9), L.StepLR(o, 40, 0.5)]),
    "chained-in-sequential": lambda o: L.SequentialLR(
        o, [L.ChainedScheduler([L.LinearLR(o, 0.5, 1.0, 10), L.ExponentialLR(o, 0.99)]), L.CosineAnnealingLR(o, 60)], milestones=[40]
    ),
    "large-batch": large_batch,
}


def metric(step):
    return 1 / (1 + min(step, 40 + step % 7))


def rates(o):
    out = [g["lr"] for g in o.param_groups]
    for g in o.param_groups:
        out.append(g["betas"][0] if "betas" in g else g["momentum"])
    return out


def advance(s, o, step):
    o.step()
    if isinstance(s, L.ReduceLROnPlateau):
        s.step(metric(step))
    else:
        s.step()


def keys(state):
    return [[k, keys(v[0]) if k == "_schedulers" else type(v).__name__] for k, v in state.items()]


def main():
    os.chdir(sys.argv[1])
    out = {}
    for name, make in MAKE.items():
        o = optimizer("adam" in name)
        s = make(o)
        begin = 0
        if sys.argv[2] == "resume":
            o.load_state_dict(torch.load(f"go-{name}-optim.pt"))
            s.load_state_dict(torch.load(f"go-{name}.pt"))
            begin = SAVE
        got = [rates(o)]
        shape = None
        for step in range(begin, STEPS):
            if step == SAVE and begin == 0:
                torch.save(s.state_dict(), f"py-{name}.pt")
                torch.save(o.state_dict(), f"py-{name}-optim.pt")
                shape = keys(s.state_dict())
            advance(s, o, step)
            got.append(rates(o))
        out[name] = {"rates": got, "keys": shape}
    with open(sys.argv[2] + ".json", "w") as f:
        json.dump(out, f)


main()
