"""A rank that reduces tensors of any size."""
import torch
import torch.distributed as dist

import goddpbench

torch.set_num_threads(1)
dist.init_process_group("gloo")


def handle(request):
    n, size = request["n"], request["size"]
    t = torch.zeros(size // 4)
    dist.all_reduce(t)

    def work():
        for _ in range(n):
            dist.all_reduce(t)

    answer = goddpbench.measure(n, work)
    return answer | {"bandwidth": [size / answer["seconds"][0]]}


goddpbench.serve(handle)
dist.destroy_process_group()
