"""Prints what torch.utils.data's samplers give; samplers.txt is its output. Run: python gen_samplers.py > samplers.txt"""
import hashlib, itertools
import torch
from torch.utils.data import (BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler,
                              WeightedRandomSampler, random_split)
from torch.utils.data.distributed import DistributedSampler


def digest(lists):
    text = ";".join(",".join(map(str, x)) for x in lists)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def state(g=None):
    return digest([(g or torch.default_generator).get_state().tolist()])


# Every rank's indices, over seeds and epochs.
for n, world, shuffle, drop in itertools.product((0, 1, 2, 3, 10, 31, 100, 1000), (1, 2, 3, 4, 8), (True, False), (True, False)):
    lists = []
    for seed, epoch, rank in itertools.product((0, 1, 42, -7, 1 << 40), (0, 1, 5), range(world)):
        s = DistributedSampler(range(n), world, rank, shuffle, seed, drop)
        s.set_epoch(epoch)
        x = list(s)
        assert len(x) == len(s)
        lists.append(x)
    print(f"distributed {n} {world} {shuffle} {drop}:", digest(lists))
print("distributed 10 3 rank 1:", list(DistributedSampler(range(10), 3, 1)))
print("randperm:", torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist(),
      digest([torch.randperm(50000, generator=torch.Generator().manual_seed(3)).tolist()]))

weights = [0.9, 0.4, 0.05, 0.2, 0.3, 0.1, 0.0, 7.5]
for own in (False, True):
    for name, make in {
        "random": lambda g: RandomSampler(range(10), generator=g),
        "random 25": lambda g: RandomSampler(range(10), num_samples=25, generator=g),
        "random with": lambda g: RandomSampler(range(10), replacement=True, num_samples=70, generator=g),
        "random wide": lambda g: RandomSampler(range(1 << 29), replacement=True, num_samples=3, generator=g),
        "subset": lambda g: SubsetRandomSampler([5, 3, 8, 1, 13], generator=g),
        "weighted": lambda g: WeightedRandomSampler(weights, 40, generator=g),
        "weighted without": lambda g: WeightedRandomSampler(weights, 6, replacement=False, generator=g),
    }.items():
        torch.manual_seed(17)
        g = torch.Generator().manual_seed(5) if own else None
        s = make(g)
        print(f"{name} {own}:", list(s), list(s), state(), state(g))

for n, size, drop in itertools.product((0, 1, 7, 12), (1, 3, 4), (True, False)):
    b = BatchSampler(SequentialSampler(range(n)), size, drop)
    print(f"batch {n} {size} {drop}:", len(b), list(b))

for own, shuffle in itertools.product((False, True), (False, True)):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(5) if own else None
    l = DataLoader(list(range(10)), batch_size=4, shuffle=shuffle, generator=g)
    print(f"loader {own} {shuffle}:", len(l), [b.tolist() for b in l], [b.tolist() for b in l], state(), state(g))

for own in (False, True):
    torch.manual_seed(3)
    g = torch.Generator().manual_seed(42) if own else None
    print(f"split {own}:", [x.indices for x in random_split(range(10), [3, 7], generator=g)],
          [x.indices for x in random_split(range(31), [0.3, 0.3, 0.4], generator=g)], state(), state(g))
