"""What Python's torch.amp does, as JSON for the Go test. usage: amp.py <directory>"""
import json
import os
import sys

import torch
import torch.nn.functional as F


def numbers(*shape):
    n = 1
    for s in shape:
        n *= s
    i = torch.arange(n)
    return (((i * 37 + 11) % 64 - 32).to(torch.float32) / 16).reshape(shape)


def table():
    a, b, c = numbers(4, 4), numbers(4, 4) + 1, numbers(2, 4, 4)
    img, w = numbers(1, 2, 5, 5), numbers(3, 2, 3, 3)
    v = numbers(4)
    h = a.bfloat16()
    ops = {
        "matmul": lambda: a.matmul(b),
        "mm": lambda: a.mm(b),
        "addmm": lambda: torch.addmm(a, a, b),
        "bmm": lambda: c.bmm(c),
        "baddbmm": lambda: torch.baddbmm(c, c, c),
        "linear": lambda: F.linear(a, b, v),
        "conv2d": lambda: F.conv2d(img, w),
        "add": lambda: a + b,
        "add-mixed": lambda: a + h,
        "relu": lambda: a.relu(),
        "exp": lambda: a.exp(),
        "exp-bf16": lambda: h.exp(),
        "mse_loss": lambda: F.mse_loss(h, b.bfloat16()),
        "cat-mixed": lambda: torch.cat([a, h]),
        "stack-mixed": lambda: torch.stack([a, h]),
        "layer_norm": lambda: F.layer_norm(h, (4,)),
        "avg_pool2d": lambda: F.avg_pool2d(img.bfloat16(), 2),
        "double-matmul": lambda: a.double().matmul(b.double()),
        "int-matmul": lambda: a.long().matmul(b.long()),
        "gelu": lambda: F.gelu(h),
        "square": lambda: a.square(),
        "sigmoid-bf16": lambda: h.sigmoid(),
        "logsumexp-bf16": lambda: h.logsumexp(0),
        "binary_cross_entropy_with_logits": lambda: F.binary_cross_entropy_with_logits(h, h.sigmoid()),
    }
    out = {}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            for name, op in ops.items():
                try:
                    out[f"{name}/{dtype}"] = str(op().dtype)
                except RuntimeError:
                    out[f"{name}/{dtype}"] = "error"
    return out


def backward():
    x, w = numbers(6, 5), numbers(5, 3).requires_grad_()
    with torch.autocast("cpu"):
        loss = x.matmul(w).relu().float().pow(2).mean()
    loss.backward()
    return {"loss": loss.item(), "grad": w.grad.flatten().tolist()}


def scaler(algo, kw, clip):
    params = [numbers(3, 4).requires_grad_(), numbers(5).requires_grad_(), numbers(4).requires_grad_()]
    make = getattr(torch.optim, algo)
    opts = [make(params[:2], **kw), make(params[2:], **kw)]
    s = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    steps = []
    for i in range(30):
        for o in opts:
            o.zero_grad()
        loss = sum((p * p * (0.1 * (k + 1))).sum() for k, p in enumerate(params))
        s.scale(loss).backward()
        if i in (3, 11, 12):
            params[1].grad[0] = float("inf") if i != 12 else float("nan")
        if i == 20:
            params[2].grad[1] = float("-inf")
        if clip:
            for o in opts:
                s.unscale_(o)
            for ps in (params[:2], params[2:]):
                torch.nn.utils.clip_grad_norm_(ps, 0.5)
        for o in opts:
            s.step(o)
        s.update()
        steps.append([s.get_scale(), s._get_growth_tracker(), [p.flatten().tolist() for p in params]])
    return {"steps": steps, "state": [[k, type(v).__name__, v] for k, v in s.state_dict().items()]}


os.chdir(sys.argv[1])
out = {
    "table": table(),
    "backward": backward(),
    "scaler": {
        "sgd": scaler("SGD", {"lr": 0.1, "momentum": 0.9}, False),
        "sgd-clip": scaler("SGD", {"lr": 0.1, "momentum": 0.9}, True),
        "sgd-fused": scaler("SGD", {"lr": 0.1, "fused": True}, False),
        "adam": scaler("Adam", {"lr": 0.01}, False),
        "adam-fused": scaler("Adam", {"lr": 0.01, "fused": True}, False),
        "adam-fused-clip": scaler("Adam", {"lr": 0.01, "fused": True}, True),
    },
}
with open("amp.json", "w") as f:
    json.dump(out, f)
