"""Prints the versions, and whether Go's libtorch_cpu.so ($GODDP_TORCH_LIB) has the bytes of this Python's."""
import filecmp
import json
import os
import platform

import torch
import torchvision

mine = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
theirs = os.environ.get("GODDP_TORCH_LIB", "")
print(json.dumps({
    "Python": platform.python_version(), "Torch": torch.__version__, "Torchvision": torchvision.__version__,
    "Same": bool(theirs) and (os.path.samefile(mine, theirs) or filecmp.cmp(mine, theirs, shallow=False)),
}))
