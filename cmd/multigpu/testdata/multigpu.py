"""The tutorial's multigpu.py on CPU ranks, with a seed and a choice of loss: what cmd/multigpu is held against."""
import argparse
import os

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class MyTrainDataset(Dataset):
    def __init__(self, size):
        self.size = size
        self.data = [(torch.rand(20), torch.rand(1)) for _ in range(size)]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, train_data, optimizer, rank, args):
        self.rank, self.train_data, self.optimizer, self.args = rank, train_data, optimizer, args
        self.model = DDP(model)
        self.loss = F.mse_loss if args.loss == "mse" else F.cross_entropy

    def run_batch(self, source, targets):
        self.optimizer.zero_grad()
        output = self.model(source)
        loss = self.loss(output, targets)
        loss.backward()
        self.optimizer.step()

    def run_epoch(self, epoch):
        b_sz = len(next(iter(self.train_data))[0])
        print(f"[CPU{self.rank}] Epoch {epoch} | Batchsize: {b_sz} | Steps: {len(self.train_data)}", flush=True)
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self.run_batch(source, targets)

    def train(self):
        for epoch in range(self.args.total_epochs):
            self.run_epoch(epoch)
            if self.rank == 0 and epoch % self.args.save_every == 0:
                torch.save(self.model.module.state_dict(), self.args.checkpoint)
                print(f"Epoch {epoch} | Training checkpoint saved at {self.args.checkpoint}", flush=True)


def main(rank, args):
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ["MASTER_PORT"] = str(args.master_port)
    init_process_group(backend="gloo", rank=rank, world_size=args.world_size)
    torch.manual_seed(args.seed)
    dataset = MyTrainDataset(args.dataset_size)
    model = torch.nn.Linear(20, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    train_data = DataLoader(dataset, batch_size=args.batch_size, shuffle=False, sampler=DistributedSampler(dataset))
    Trainer(model, train_data, optimizer, rank, args).train()
    destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("total_epochs", type=int)
    p.add_argument("save_every", type=int)
    p.add_argument("--world-size", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--dataset-size", type=int, default=2048)
    p.add_argument("--checkpoint", default="checkpoint.pt")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--loss", default="cross_entropy")
    p.add_argument("--master-port", type=int, default=12355)
    a = p.parse_args()
    mp.spawn(main, args=(a,), nprocs=a.world_size)
