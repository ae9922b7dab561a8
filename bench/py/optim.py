"""Steps optimizers, one at a time."""
import json
import os
import sys

import torch

import goddpbench

args = json.loads(sys.argv[1])
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
params = [torch.randn(s, requires_grad=True) for s in args["Shapes"]]
for p in params:
    p.grad = torch.randn_like(p) * 1e-3
made = {}


def handle(request):
    name, n = request["do"], request["n"]
    if name not in made:
        made.clear()
        case = args["Cases"][name]
        if case["Algo"] == "clip":
            made[name] = lambda: torch.nn.utils.clip_grad_norm_(params, 1.0)
        else:
            made[name] = getattr(torch.optim, case["Algo"])(params, **case["KW"]).step
    step = made[name]

    def work():
        for _ in range(n):
            step()

    return goddpbench.measure(n, work)


goddpbench.serve(handle)
