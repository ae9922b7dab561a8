"""files.py ROOT MNIST CIFAR: makes up so many images in the file formats of MNIST and CIFAR-10."""
import os
import pickle
import struct
import sys

import numpy as np

root, mnist, cifar = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = np.random.default_rng(0)

d = os.path.join(root, "cifar-10-batches-py")
os.makedirs(d)
for i in range(1, 6):
    n = cifar // 5
    batch = {"data": rng.integers(0, 256, (n, 3072), dtype=np.uint8), "labels": rng.integers(0, 10, n).tolist()}
    with open(os.path.join(d, f"data_batch_{i}"), "wb") as f:
        pickle.dump(batch, f, protocol=2)
with open(os.path.join(d, "batches.meta"), "wb") as f:
    pickle.dump({"label_names": list("abcdefghij")}, f, protocol=2)

d = os.path.join(root, "MNIST", "raw")
os.makedirs(d)
for part, n in (("train", mnist), ("t10k", mnist // 6)):
    pix = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
    pix[rng.random(pix.shape) < 0.8] = 0  # digits are mostly black
    with open(os.path.join(d, part + "-images-idx3-ubyte"), "wb") as f:
        f.write(struct.pack(">4I", 0x803, n, 28, 28) + pix.tobytes())
    with open(os.path.join(d, part + "-labels-idx1-ubyte"), "wb") as f:
        f.write(struct.pack(">2I", 0x801, n) + rng.integers(0, 10, n, dtype=np.uint8).tobytes())
