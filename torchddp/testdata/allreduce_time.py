"""Times small all-reduces between two Python ranks: allreduce_time.py RANK PORT CALLS. Rank 0 prints seconds a call."""
import sys
import time

import torch
import torch.distributed as dist

rank, port, calls = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
x = torch.tensor([1.0, 2.0])
for _ in range(200):
    dist.all_reduce(x)
dist.barrier()
start = time.perf_counter()
for _ in range(calls):
    dist.all_reduce(x)
if rank == 0:
    print((time.perf_counter() - start) / calls)
dist.barrier()
dist.destroy_process_group()
