"""Steps Python's optimizers on gradients that the Go test also uses.

usage: trajectories.py <directory> run      reads cases.json; writes the gradients and, for every case, a digest of the
                                            parameters after every step; saves optimizers where a case asks for it
       trajectories.py <directory> resume   continues the saved cases from the states that Go saved
       trajectories.py <directory> cuda     as run, with everything on the GPU
"""
import hashlib
import json
import os
import sys

import torch

STEPS = 100
SHAPES = [(33, 17), (5,), (4, 3, 5, 6), (40001,), (), (1, 1), (16384,)]
CHANNELS_LAST = 2  # index into SHAPES
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def raw(tensors):
    out = []
    for t in tensors:
        t = t.detach().cpu().contiguous()
        if t.dtype == torch.bfloat16:
            t = t.view(torch.int16)
        out.append(t.numpy().tobytes())
    return b"".join(out)


def make(shape, index, gen, dtype):
    t = torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype)
    if index == CHANNELS_LAST:
        t = t.contiguous(memory_format=torch.channels_last)
    return t


def lars(params, grads, state, lr, momentum, weight_decay, trust, eps):
    for i, (p, g) in enumerate(zip(params, grads)):
        if g is None:
            continue
        pn, gn = p.norm(), g.norm()
        ratio = (pn * trust) / (gn.add(pn, alpha=weight_decay).add(eps))
        if not (pn > 0 and gn > 0):
            ratio = torch.ones_like(ratio)
        d = g.add(p, alpha=weight_decay) * ratio
        if i not in state:
            state[i] = d.clone()
        else:
            state[i].mul_(momentum).add_(d)
        p.add_(state[i], alpha=-lr)


def lamb(params, grads, state, lr, weight_decay, eps):
    b1, b2 = 0.9, 0.999
    for i, (p, g) in enumerate(zip(params, grads)):
        if g is None:
            continue
        m, v, step = state.get(i, (torch.zeros_like(p), torch.zeros_like(p), 0))
        step += 1
        state[i] = (m, v, step)
        m.lerp_(g, 1 - b1)
        v.mul_(b2).addcmul_(g, g, value=1 - b2)
        u = (m / (v.sqrt() / (1 - b2**step) ** 0.5 + eps)) / (1 - b1**step)
        u = u.add(p, alpha=weight_decay)
        pn, un = p.norm(), u.norm()
        ratio = pn / un if pn > 0 and un > 0 else torch.ones_like(pn)
        p.add_(u * ratio, alpha=-lr)


def flatten(state):
    """A state dict's layout without its tensors, to be compared with Go's."""
    if isinstance(state, dict):
        return [[k, flatten(v)] for k, v in state.items()]
    if isinstance(state, (list, tuple)):
        return [type(state).__name__, [flatten(v) for v in state]]
    if isinstance(state, torch.Tensor):
        return [str(state.dtype).removeprefix("torch."), list(state.shape)]
    return [type(state).__name__, state]


def load_raw(params, path):
    with open(path, "rb") as f:
        blob = bytearray(f.read())
    at = 0
    with torch.no_grad():
        for p in params:
            n = p.numel() * p.element_size()
            p.copy_(torch.frombuffer(blob[at : at + n], dtype=p.dtype).reshape(p.shape))
            at += n


def run(case, data, resume, device):
    dtype = DTYPES[case["dtype"]]
    params = [p.to(device, dtype).clone(memory_format=torch.preserve_format).requires_grad_() for p in data["params"]]
    kw = dict(case["kw"])
    if "betas" in kw:
        kw["betas"] = tuple(kw["betas"])
    groups = case.get("groups")
    given = params
    if groups:
        given = [{"params": [params[i] for i in g["params"]], **g.get("kw", {})} for g in groups]
    opt = None
    custom = {}
    if case["algo"] not in ("LARS", "LAMB"):
        opt = getattr(torch.optim, case["algo"])(given, **kw)
    digests = []
    begin = 0
    if resume:
        begin = case["save"]
        load_raw(params, "go-" + case["name"] + ".params")
        opt.load_state_dict(torch.load("go-" + case["name"] + ".pt"))
    # Python's fused SGD with momentum fails for a parameter that gets its first gradient late.
    late = not (case["algo"] == "SGD" and kw.get("fused") and kw.get("momentum", 0) != 0)
    for step in range(begin, STEPS):
        for i, p in enumerate(params):
            # The last parameter gets its first gradient late, and another one misses some.
            p.grad = None
            if (late and i == len(params) - 1 and step < 3) or (i == 1 and step % 7 == 6):
                continue
            p.grad = data["grads"][step % len(data["grads"])][i].to(device, dtype).clone(memory_format=torch.preserve_format)
        if opt is not None:
            opt.step()
        else:
            with torch.no_grad():
                f = {"LARS": lars, "LAMB": lamb}[case["algo"]]
                f(params, [p.grad for p in params], custom, **kw)
        digests.append(hashlib.sha256(raw(params)).hexdigest())
        if not resume and case.get("save") == step + 1:
            torch.save(opt.state_dict(), "py-" + case["name"] + ".pt")
            with open("py-" + case["name"] + ".json", "w") as f:
                json.dump(flatten(opt.state_dict()), f)
            with open("py-" + case["name"] + ".params", "wb") as f:
                f.write(raw(params))
    return digests


def main():
    os.chdir(sys.argv[1])
    gen = torch.Generator().manual_seed(20240607)
    data = {
        "params": [make(s, i, gen, torch.float64) for i, s in enumerate(SHAPES)],
        "grads": [[make(s, i, gen, torch.float64) for i, s in enumerate(SHAPES)] for _ in range(20)],
    }
    with open("cases.json") as f:
        cases = json.load(f)
    resume = sys.argv[2] == "resume"
    if resume:
        cases = [c for c in cases if c.get("save")]
    else:
        with open("data.bin", "wb") as f:
            f.write(raw(data["params"]))
            for g in data["grads"]:
                f.write(raw(g))
    with open(sys.argv[2] + ".json", "w") as f:
        device = "cuda" if sys.argv[2] == "cuda" else "cpu"
        json.dump({c["name"]: run(c, data, resume, device) for c in cases}, f)


main()
