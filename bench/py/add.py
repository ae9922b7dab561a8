"""Adds 20 floats."""
import torch

import goddpbench

torch.set_num_threads(1)
a, b = torch.ones(20), torch.ones(20)


def handle(request):
    n = request["n"]

    def work():
        for _ in range(n):
            t = a + b

    return goddpbench.measure(n, work)


goddpbench.serve(handle)
