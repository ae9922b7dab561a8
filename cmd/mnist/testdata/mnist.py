"""The tutorial's MNIST job, on CPU ranks: what cmd/mnist --plain prints is held against it."""
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms


class SimpleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 256)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, x):
        x = x.view(-1, 28 * 28)
        x = torch.relu(self.fc1(x))
        return self.fc2(x)


def train(rank, world_size, root):
    dist.init_process_group(backend="gloo", init_method="env://", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_dataset = datasets.MNIST(root, train=True, transform=transforms.ToTensor())
    test_dataset = datasets.MNIST(root, train=False, transform=transforms.ToTensor())
    sampler = DistributedSampler(train_dataset)
    train_loader = DataLoader(train_dataset, batch_size=64, sampler=sampler)
    model = DDP(SimpleNet())
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        model.train()
        sampler.set_epoch(epoch)
        total_loss = 0
        for data, target in train_loader:
            optimizer.zero_grad()
            output = model(data)
            loss = criterion(output, target)
            loss.backward()
            optimizer.step()
            total_loss += loss.item()
        print(f"Rank {rank}, Epoch {epoch + 1}, Avg Loss: {total_loss / len(train_loader):.6f}", flush=True)
        if rank == 0:
            model.eval()
            with torch.no_grad():
                right = sum((model.module(x).argmax(1) == y).sum().item() for x, y in DataLoader(test_dataset, batch_size=500))
            print(f"Epoch {epoch + 1}, Test Accuracy: {100 * right / len(test_dataset):.2f}%", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    world = int(sys.argv[1])
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = sys.argv[3]
    mp.spawn(train, args=(world, sys.argv[2]), nprocs=world, join=True)
