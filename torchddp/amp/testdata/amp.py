"""What Python's torch.amp does, as JSON for the Go test.

usage: amp.py <directory>                 the table, a backward, and scalers from their start
       amp.py <directory> go-scaler.pt    a scaler that goes on from a state that Go saved, and saves its own half-way
"""
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
    ops |= lower() | full()
    out = {}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            for name, op in ops.items():
                try:
                    out[f"{name}/{dtype}"] = str(op().dtype)
                except RuntimeError:
                    out[f"{name}/{dtype}"] = "error"
    return out


def lower():
    """Those that autocast runs in the lower precision, given float32."""
    seq, w1, vol, w3 = numbers(1, 2, 5), numbers(3, 2, 3), numbers(1, 2, 5, 5, 5), numbers(3, 2, 3, 3, 3)
    img, a, c, q = numbers(1, 2, 5, 5), numbers(4, 4), numbers(2, 4, 4), numbers(1, 2, 4, 4)
    return {
        "conv1d": lambda: F.conv1d(seq, w1),
        "conv3d": lambda: F.conv3d(vol, w3),
        "conv_transpose1d": lambda: F.conv_transpose1d(seq, numbers(2, 3, 3)),
        "conv_transpose2d": lambda: F.conv_transpose2d(img, numbers(2, 3, 3, 3)),
        "conv_transpose3d": lambda: F.conv_transpose3d(vol, numbers(2, 3, 3, 3, 3)),
        "addbmm": lambda: torch.addbmm(a, c, c),
        "prelu": lambda: F.prelu(a, numbers(1)),
        "linalg_vecdot": lambda: torch.linalg.vecdot(a, a),
        "attention": lambda: F.scaled_dot_product_attention(q, q, q),
        "softmax": lambda: a.softmax(1),
        "log_softmax": lambda: a.log_softmax(1),
        "sum-f32": lambda: a.sum(dtype=torch.float32),
        "cumsum-f32": lambda: a.cumsum(0, dtype=torch.float32),
        "norm": lambda: torch.ops.aten.norm.Scalar(a),
        "layer_norm-f32": lambda: F.layer_norm(a, (4,)),
    }


def full():
    """Those that autocast runs in float32, given bfloat16, and some that it leaves alone."""
    half = torch.bfloat16
    h, other = numbers(4, 4).to(half), (numbers(4, 4) + 1).to(half)
    vol, img, seq = numbers(1, 2, 4, 4, 4).to(half), numbers(1, 2, 5, 5).to(half), numbers(1, 2, 5).to(half)
    good = torch.tensor([[4.0, 1], [1, 3]]).to(half)
    row, sign, grid = numbers(4).to(half), torch.tensor([1.0, -1, 1, -1]).to(half), numbers(1, 2, 2, 2).to(half)
    label, index = torch.arange(4), torch.tensor([1, 0])
    p = h.sigmoid
    return {
        "avg_pool3d": lambda: F.avg_pool3d(vol, 2),
        "max_pool3d": lambda: F.max_pool3d(vol, 2),
        "adaptive_avg_pool3d": lambda: F.adaptive_avg_pool3d(vol, 2),
        "reflection_pad1d": lambda: torch.ops.aten.reflection_pad1d(seq, [1, 1]),
        "reflection_pad2d": lambda: torch.ops.aten.reflection_pad2d(img, [1, 1, 1, 1]),
        "replication_pad1d": lambda: torch.ops.aten.replication_pad1d(seq, [1, 1]),
        "replication_pad2d": lambda: torch.ops.aten.replication_pad2d(img, [1, 1, 1, 1]),
        "replication_pad3d": lambda: torch.ops.aten.replication_pad3d(vol, [1, 1, 1, 1, 1, 1]),
        "grid_sampler": lambda: torch.grid_sampler(img, grid, 0, 0, False),
        "binary_cross_entropy": lambda: F.binary_cross_entropy(p(), p()),
        "nll_loss": lambda: F.nll_loss(h, label),
        "cross_entropy_loss": lambda: F.cross_entropy(h, label),
        "l1_loss": lambda: F.l1_loss(h, other),
        "smooth_l1_loss": lambda: F.smooth_l1_loss(h, other),
        "huber_loss": lambda: F.huber_loss(h, other),
        "kl_div": lambda: F.kl_div(h, p()),
        "soft_margin_loss": lambda: F.soft_margin_loss(row, sign),
        "hinge_embedding_loss": lambda: F.hinge_embedding_loss(row, sign),
        "margin_ranking_loss": lambda: F.margin_ranking_loss(row, row, sign),
        "triplet_margin_loss": lambda: F.triplet_margin_loss(h, other, h),
        "poisson_nll_loss": lambda: F.poisson_nll_loss(h, p()),
        "cosine_embedding_loss": lambda: F.cosine_embedding_loss(h, other, sign),
        "multilabel_margin_loss": lambda: F.multilabel_margin_loss(row, torch.tensor([1, -1, 0, 0])),
        "quantile": lambda: h.quantile(torch.tensor([0.5]), 0),
        "trace": lambda: h.trace(),
        "cdist": lambda: torch.cdist(h, other),
        "cholesky": lambda: good.cholesky(),
        "cholesky_inverse": lambda: good.cholesky_inverse(),
        "inverse": lambda: good.inverse(),
        "pinverse": lambda: good.pinverse(),
        "linalg_inv": lambda: torch.linalg.inv(good),
        "linalg_det": lambda: torch.linalg.det(good),
        "linalg_cholesky": lambda: torch.linalg.cholesky(good),
        "linalg_solve": lambda: torch.linalg.solve(good, good),
        "fft_fft": lambda: torch.fft.fft(h),
        "fft_rfft": lambda: torch.fft.rfft(h),
        "index_copy": lambda: numbers(4, 4).index_copy(0, index, h[:2]),
        "softmax-bf16": lambda: h.softmax(1),
        "log_softmax-bf16": lambda: h.log_softmax(1),
        "sum-bf16": lambda: h.sum(dtype=half),
        "sum-to-f32": lambda: h.sum(dtype=torch.float32),
        "cumsum-bf16": lambda: h.cumsum(0, dtype=half),
        "cumsum-to-f32": lambda: h.cumsum(0, dtype=torch.float32),
        "prod-bf16": lambda: h.prod(dtype=half),
        "prod-to-f32": lambda: h.prod(dtype=torch.float32),
        "cumprod-bf16": lambda: h.cumprod(0, dtype=half),
        "norm-bf16": lambda: torch.ops.aten.norm.Scalar(h),
        "mm-bf16": lambda: h.mm(other),
    }


def backward():
    x, w = numbers(6, 5), numbers(5, 3).requires_grad_()
    with torch.autocast("cpu"):
        loss = x.matmul(w).relu().float().pow(2).mean()
    loss.backward()
    return {"loss": loss.item(), "grad": w.grad.flatten().tolist()}


def resume(path):
    """A scaler that goes on from what Go saved: its scale and tracker after each of ten steps, of which two overflow."""
    s = torch.amp.GradScaler("cpu")
    s.load_state_dict(torch.load(path))
    p = numbers(3).requires_grad_()
    opt = torch.optim.SGD([p], lr=0.1)
    steps = []
    for i in range(10):
        opt.zero_grad()
        s.scale((p * p).sum()).backward()
        if i in (2, 7):
            p.grad[1] = float("inf")
        s.step(opt)
        s.update()
        steps.append([s.get_scale(), s._get_growth_tracker(), p.tolist()])
        if i == 4:
            torch.save(s.state_dict(), "py-scaler.pt")
    return steps


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
if len(sys.argv) > 2:
    with open("resume.json", "w") as f:
        json.dump(resume(sys.argv[2]), f)
    sys.exit()
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
