"""What Python's torch.amp does on a GPU, as JSON for the Go test: a backward under autocast, and scalers with overflows."""
import json

import torch


def numbers(*shape):
    n = 1
    for s in shape:
        n *= s
    i = torch.arange(n)
    return (((i * 37 + 11) % 64 - 32).to(torch.float32) / 16).reshape(shape).cuda()


def backward(dtype):
    x, w, v = numbers(16, 8), numbers(8, 16).requires_grad_(), numbers(16, 4).requires_grad_()
    with torch.autocast("cuda", dtype=dtype):
        out = x.matmul(w).relu().matmul(v)
        kept = str(out.dtype)
        loss = out.float()
        loss = (loss * loss).mean()
    (loss * 1e-4).backward()
    return {"dtype": kept, "loss": loss.item(), "grads": [g.grad.flatten().tolist() for g in (w, v)]}


def scaler(algo, kw):
    p = numbers(3, 4).requires_grad_()
    opt = getattr(torch.optim, algo)([p], **kw)
    s = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3)
    steps = []
    for i in range(12):
        opt.zero_grad()
        s.scale((p * p * 0.1).sum()).backward()
        if i in (2, 7):
            p.grad[1, 2] = float("inf") if i == 2 else float("nan")
        s.step(opt)
        s.update()
        steps.append({"scale": s.get_scale(), "param": p.flatten().tolist()})
    return steps


print(json.dumps({
    "backward": {"bfloat16": backward(torch.bfloat16), "float16": backward(torch.float16)},
    "scaler": {
        "sgd": scaler("SGD", {"lr": 0.1, "momentum": 0.9}),
        "sgd-fused": scaler("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
        "adam": scaler("Adam", {"lr": 0.01}),
        "adam-fused": scaler("Adam", {"lr": 0.01, "fused": True}),
    },
}))
