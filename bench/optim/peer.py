"""The Python side of the optimizer benchmark: told a case and a number of steps on stdin, it answers with seconds a step, of
the clock and of processor time."""
import json
import sys
import time

import torch

shapes = json.loads(sys.argv[1])
torch.set_num_threads(int(sys.argv[2]))
made = {}


def make(case):
    algo, kw = case["algo"], dict(case["kw"])
    params = [torch.randn(s, requires_grad=True) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    if algo == "clip":
        return lambda: torch.nn.utils.clip_grad_norm_(params, 1.0)
    return getattr(torch.optim, algo)(params, **kw).step


for line in sys.stdin:
    case = json.loads(line)
    name = case["name"]
    if name not in made:
        made.clear()  # one set of parameters at a time
        made[name] = make(case)
        made[name]()
    step = made[name]
    times = []
    for _ in range(case["steps"]):
        t, cpu = time.perf_counter(), time.process_time()
        step()
        times.append((time.perf_counter() - t, time.process_time() - cpu))
    print(json.dumps(times), flush=True)
