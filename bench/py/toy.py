"""A rank of the toy job: the tutorial's loop, as cmd/multigpu/testdata/multigpu.py has it."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import goddpbench


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.size = size
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index]


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = MyTrainDataset(2048)
model = torch.nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
sampler = DistributedSampler(dataset)
batches = DataLoader(dataset, batch_size=32, shuffle=False, sampler=sampler)
ddp = DDP(model)
x, y = torch.rand(32, 20), torch.rand(32, 1)
started = goddpbench.memory()
epoch = 0


def step(x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(ddp(x), y)
    loss.backward()
    optimizer.step()


def handle(request):
    n = request["n"]

    def steps():
        for _ in range(n):
            step(x, y)

    def epochs():
        global epoch
        for _ in range(n):
            epoch += 1
            sampler.set_epoch(epoch)
            for source, targets in batches:
                step(source, targets)

    if request["do"] == "step":
        return goddpbench.measure(n, steps)
    if request["do"] == "epoch":
        return goddpbench.measure(n * len(batches), epochs)
    steps()
    now = goddpbench.memory()
    return {"start " + k: v for k, v in started.items()} | {"steps " + k: v for k, v in now.items()}


goddpbench.serve(handle)
dist.destroy_process_group()
