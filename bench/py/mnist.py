"""A rank of the tutorial that trains SimpleNet on MNIST, on the CPU."""
import json
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

import goddpbench


class SimpleNet(nn.Module):
    def __init__(self):
        super(SimpleNet, self).__init__()
        self.fc1 = nn.Linear(28 * 28, 256)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, x):
        x = x.view(-1, 28 * 28)
        x = torch.relu(self.fc1(x))
        return self.fc2(x)


args = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
train_dataset = datasets.MNIST(args["Root"], train=True, transform=transforms.ToTensor())
sampler = DistributedSampler(train_dataset)
train_loader = DataLoader(train_dataset, batch_size=64, sampler=sampler)
model = DDP(SimpleNet())
optimizer = optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
epoch = 0


def train():
    total_loss = 0
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
        total_loss += loss.item()


def load():
    for data, target in train_loader:
        pass


def handle(request):
    global epoch
    model.train()
    sampler.set_epoch(epoch)
    epoch += 1
    answer = goddpbench.measure(1, train if request["do"] == "epoch" else load)
    return answer | {"an image": [answer["seconds"][0] / len(sampler)]}


goddpbench.serve(handle)
dist.destroy_process_group()
