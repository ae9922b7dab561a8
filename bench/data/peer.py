"""The Python side of bench/data: makes the files, then measures what the Go side asks for, one line a request.

Times are the process's processor time, so that other work on the machine does not count."""
import json, os, pickle, struct, sys, time
import numpy as np
import torch
import torchvision
import torchvision.datasets.cifar as cifar
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms as T

torch.set_num_threads(1)
cifar.check_integrity = lambda *a: True  # the files are made here, not the published ones
root, images = sys.argv[1], int(sys.argv[2])


def files():
    rng = np.random.default_rng(0)
    d = os.path.join(root, "cifar-10-batches-py")
    os.makedirs(d)
    for i in range(1, 6):
        n = images // 5
        batch = {"data": rng.integers(0, 256, (n, 3072), dtype=np.uint8), "labels": rng.integers(0, 10, n).tolist()}
        pickle.dump(batch, open(os.path.join(d, f"data_batch_{i}"), "wb"), protocol=2)
    pickle.dump({"label_names": list("abcdefghij")}, open(os.path.join(d, "batches.meta"), "wb"), protocol=2)
    d = os.path.join(root, "MNIST", "raw")
    os.makedirs(d)
    for part, n in (("train", 60000), ("t10k", 10000)):
        pix = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        pix[rng.random(pix.shape) < 0.8] = 0
        open(os.path.join(d, part + "-images-idx3-ubyte"), "wb").write(struct.pack(">4I", 0x803, n, 28, 28) + pix.tobytes())
        open(os.path.join(d, part + "-labels-idx1-ubyte"), "wb").write(struct.pack(">2I", 0x801, n) + rng.integers(0, 10, n, dtype=np.uint8).tobytes())


class Toy(Dataset):
    def __init__(self, size):
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i]


class First(torch.utils.data.Subset):
    def __init__(self, d, n):
        super().__init__(d, range(min(n, len(d))))


def rate(loader):
    n, t = 0, time.process_time()
    for x, y in loader:
        n += len(x)
    return n / (time.process_time() - t)


files()
c10 = torchvision.datasets.CIFAR10(root, transform=T.Compose([
    T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.ToTensor(),
    T.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))]))
mnist = torchvision.datasets.MNIST(root, transform=T.Compose([T.ToTensor(), T.Normalize((0.1307,), (0.3081,))]))
toy = Toy(2048)


def cifar10():
    return rate(DataLoader(First(c10, 4000), batch_size=128, shuffle=True))


def mnist_load():
    return rate(DataLoader(First(mnist, 10000), batch_size=64, shuffle=True))


def mnist_train():
    """Seconds that an epoch's training steps take in PyTorch, its batches being there already."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.rand(64, 1, 28, 28), torch.randint(0, 10, (64,))
    steps = 200
    t = time.process_time()
    for _ in range(steps):
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    return (time.process_time() - t) / steps * 938


def toy_batch():
    s = DistributedSampler(toy, 1, 0)
    l = DataLoader(toy, batch_size=32, sampler=s)
    t = time.process_time()
    for e in range(5):
        s.set_epoch(e)
        for _ in l: pass
    return (time.process_time() - t) / (5 * 64)


print(json.dumps({"torch": torch.__version__, "torchvision": torchvision.__version__}), flush=True)
for line in sys.stdin:
    print(json.dumps(globals()[line.strip()]()), flush=True)
