"""Writes the corpus of checkpoint files that the tests read: gen_corpus.py DIR [--small].

Each file is what PyTorch 2.11 writes. --small leaves out what needs more than a few kilobytes; those are committed
beside this script with the ending .ckpt, so that the tests have something to read where Python is missing.
"""
import collections
import io
import os
import struct
import sys
import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore")
out = sys.argv[1]
small = "--small" in sys.argv
ext = ".ckpt" if small else ".pt"


def save(name, obj, **kw):
    torch.save(obj, os.path.join(out, name + ext), **kw)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.fc = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))

    def forward(self, x):
        return self.fc(self.relu(self.bn(self.conv(x))).mean((2, 3)))


torch.manual_seed(0)
linear = nn.Linear(20, 1)
save("linear", linear.state_dict())

block = Block()
save("block", block.state_dict())
save("ddp", collections.OrderedDict(("module." + k, v) for k, v in block.state_dict().items()))


class Wrapped(nn.Module):  # what DDP's own state_dict looks like
    def __init__(self, m):
        super().__init__()
        self.module = m


save("wrapped", Wrapped(block).state_dict())

every = {}
for name in ("float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex32 complex64 "
             "complex128 float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu").split():
    dtype = getattr(torch, name)
    if dtype.is_complex:
        t = torch.complex(torch.tensor([1.5, -2.0, 0.25]), torch.tensor([0.5, 4.0, -1.0])).to(dtype)
    elif dtype == torch.bool:
        t = torch.tensor([True, False, True])
    else:
        t = torch.tensor([1.0, 2.0, 4.0]).to(dtype)
    every[name] = t
save("dtypes", every)

base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
save("views", {
    "base": base, "same": base, "row": base[1], "col": base[:, 2], "t": base.t(), "step": base[::2, 1::3],
    "scalar": torch.tensor(3.25), "empty": torch.empty(0), "empty2": torch.empty(2, 0, 3), "expand": torch.ones(1).expand(5),
    "channels_last": torch.arange(16.0).reshape(1, 2, 2, 4).to(memory_format=torch.channels_last),
    "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(), "neg": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "grad": torch.zeros(2, requires_grad=True), "detached": base.detach(),
})

shared = [1, 2, 3]
key = "k" * 3
save("values", {
    "int": [0, 1, 255, 256, 65535, 65536, -1, -128, -129, -32768, 2**31 - 1, 2**31, -2**31, -2**31 - 1, 2**63 - 1, -2**63,
            2**63, 2**64, -2**64, 2**200, -(2**199), 127, 128, 2**39 - 1, -2**39, -2**47],
    "float": [0.0, -0.0, 1.5, float("inf"), float("-inf"), 1e-320, 3.141592653589793],
    "str": ["", "a", "é", "naïve", "日本語", "𝄞", "line\nbreak", "a", "é", "x" * 300, "\udc80"],
    "none": None, "bool": [True, False], "complex": [1 + 2j, -0.5j], "bytes": [b"ab", b"abc", bytes(range(256)), bytearray(b"xyz"), bytearray()],
    "tuple": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((1, (2, (3,))),)],
    "nested": {"a": {"b": {"c": [[], [[]], {}]}}}, "shared": [shared, shared, (shared, shared)],
    "set": {7}, "counter": collections.Counter("abca"), "counter0": collections.Counter(), "ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
    "ordered1": collections.OrderedDict([("only", 1)]), "dtype": [torch.float32, torch.bfloat16, torch.float32], "size": torch.Size([2, 3]),
    "size0": torch.Size([]), "device": [torch.device("cpu"), torch.device("cuda:1")], 3: "int key", 1.5: "float key", None: "none key", (1, "x"): "tuple key",
    True: "true key", "again": [key, key, "".join(["k", "kk"])],
    "meta": torch.zeros(2, 3, device="meta"), "sparse": torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse(),
    "csr": torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse_csr(),
    "param": nn.Parameter(torch.ones(2, 2)), "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
    "quantized": torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 1, torch.qint8),
})
tied = nn.Parameter(torch.ones(3))
tied.note = "attribute"
save("tied", [tied, tied, tied.data])

if not small:
    for n in (999, 1000, 1001, 2000, 2001):
        save(f"batch{n}", {"list": list(range(n)), "dict": {i: i for i in range(n)}, "ordered": collections.OrderedDict((i, i) for i in range(n)),
                           "names": ["s%d" % i for i in range(n)]})


def steps(opt, model, n):
    for i in range(n):
        opt.zero_grad()
        model(torch.ones(2, 3, 8, 8) * (i + 1)).sum().backward()
        opt.step()


params = lambda m: [{"params": list(m.conv.parameters())}, {"params": list(m.fc.parameters()), "lr": 0.05}]
for name, make in {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True), "sgd0": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters()), "adamw": lambda m: torch.optim.AdamW(params(m), lr=1e-3, amsgrad=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters()), "adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
}.items():
    model = Block()
    opt = make(model)
    sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    steps(opt, model, 3)
    sched.step()
    save("train_" + name, {"iter_no": 3, "model": model.state_dict(), "optimizer": opt.state_dict(), "scheduler": sched.state_dict(),
                           "rng": torch.get_rng_state(), "ema": Block().state_dict()})

save("a.b", {"dots": 1})
save("legacy", {"iter_no": 3, "model": block.state_dict(), "views": {"base": base, "col": base[:, 2]}, "half": torch.ones(3).half(),
                "big": 2**70, "param": nn.Parameter(torch.ones(2))}, _use_new_zipfile_serialization=False)
torch.serialization.set_crc32_options(False)
save("nocrc", linear.state_dict())
torch.serialization.set_crc32_options(True)


# A file of a big-endian machine: the same records with every storage's words turned round.
def big_endian(name, obj):
    buf = io.BytesIO()
    torch.save(obj, buf)
    reader = torch._C.PyTorchFileReader(io.BytesIO(buf.getvalue()))
    writer = torch._C.PyTorchFileWriter(os.path.join(out, name + ext), True, 64)
    words = {str(i): t.dtype.itemsize // (2 if t.dtype.is_complex else 1) for i, t in enumerate(obj.values())}
    for rec in reader.get_all_records():
        data = reader.get_record(rec)
        if rec == "byteorder":
            data = b"big"
        elif rec.startswith("data/"):
            w = words[rec[5:]]
            data = b"".join(data[i:i + w][::-1] for i in range(0, len(data), w))
        elif rec in (".data/serialization_id", "version"):
            continue
        writer.write_record(rec, data, len(data))
    writer.write_end_of_file()


big_endian("big_endian", {k: every[k].clone() for k in ("float32", "float64", "bfloat16", "int16", "int64", "uint8", "complex64", "uint16")})

# Saved on a GPU: the same file with other location tags.
buf = io.BytesIO()
torch.save({"a": torch.arange(3.0), "b": torch.arange(4), "c": torch.ones(2)}, buf)
reader = torch._C.PyTorchFileReader(io.BytesIO(buf.getvalue()))
writer = torch._C.PyTorchFileWriter(os.path.join(out, "cuda" + ext), True, 64)
for rec in reader.get_all_records():
    data = reader.get_record(rec)
    if rec == "data.pkl":
        data = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
    if rec not in (".data/serialization_id", "version"):
        writer.write_record(rec, data, len(data))
writer.write_end_of_file()
