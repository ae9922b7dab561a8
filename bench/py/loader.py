"""Passes over data sets with torch's DataLoader and torchvision."""
import json
import sys

import torch
import torchvision
import torchvision.datasets.cifar as cifar_module
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T

import goddpbench

torch.set_num_threads(1)
cifar_module.check_integrity = lambda *a: True  # the files are made up, not the published ones
root = json.loads(sys.argv[1])["Root"]


class Toy(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i]


cifar = torchvision.datasets.CIFAR10(root, transform=T.Compose([
    T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.ToTensor(),
    T.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))]))
mnist = torchvision.datasets.MNIST(root, transform=T.Compose([T.ToTensor(), T.Normalize((0.1307,), (0.3081,))]))
toy = Toy(2048)


def images(dataset, size, batch):
    size = min(size, len(dataset))
    loader = DataLoader(Subset(dataset, range(size)), batch_size=batch, shuffle=True)

    def work():
        for x, y in loader:
            pass

    return goddpbench.measure(size, work)


def handle(request):
    if request["do"] == "cifar":
        return images(cifar, request["size"], 128)
    if request["do"] == "mnist":
        return images(mnist, request["size"], 64)
    sampler = DistributedSampler(toy, 1, 0)
    loader = DataLoader(toy, batch_size=32, sampler=sampler)

    def work():
        for epoch in range(request["n"]):
            sampler.set_epoch(epoch)
            for _ in loader:
                pass

    return goddpbench.measure(request["n"] * len(loader), work)


goddpbench.serve(handle)
