"""The Python side of parity_test.go.

    parity.py cases.json [name ...] < nothing > results.json      exact results, for the live comparison
    parity.py --golden cases.json > golden.json                    what is committed: losses and sums

Both sides seed, draw a little, build the model, draw the input, and train with plain SGD on one thread. What is
printed is enough to tell every bit of the weights, outputs, gradients and losses.
"""
import hashlib
import json
import sys
import types
from collections import OrderedDict

import torch
import torchvision  # noqa: F401  cases name its networks
from torch import nn

LR = 0.05
FULL = "--full" in sys.argv


class SimpleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 256)
        self.fc2 = nn.Linear(256, 10)

    def forward(self, x):
        x = x.view(-1, 28 * 28)
        return self.fc2(torch.relu(self.fc1(x)))


class Frozen(nn.Module):
    """A batch norm that stays in evaluation while the rest trains."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.bn = nn.BatchNorm1d(4)

    def train(self, mode=True):
        super().train(mode)
        self.bn.eval()
        return self

    def forward(self, x):
        return self.bn(self.fc(x))


class Tied(nn.Module):
    """Two layers with one weight, and one layer used in two places."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.b.weight = self.a.weight
        self.again = self.b

    def forward(self, x):
        return self.again(torch.relu(self.b(torch.relu(self.a(x)))))


def cifar(make, **options):
    """A torchvision ResNet whose stem is made for small images, drawing numbers in the order of its constructor."""
    resnet = sys.modules["torchvision.models.resnet"]

    class Stem(type):
        """Stands for nn.Conv2d in the constructor: in calls and in isinstance."""

        def __instancecheck__(cls, m):
            return isinstance(m, nn.Conv2d)

        def __call__(cls, i, o, kernel_size, **k):
            if kernel_size == 7:
                return nn.Conv2d(i, o, kernel_size=3, stride=1, padding=1, bias=False)
            return nn.Conv2d(i, o, kernel_size=kernel_size, **k)

    original = resnet.nn
    resnet.nn = types.SimpleNamespace(**vars(nn))
    resnet.nn.Conv2d = Stem("Conv2d", (), {})
    resnet.nn.MaxPool2d = lambda **k: nn.Identity()
    try:
        return make(**options)
    finally:
        resnet.nn = original


def sha(t):
    t = t.detach().contiguous().cpu()
    if t.dim() == 0:
        t = t.reshape(1)
    return hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def fill(kind, args):
    if kind == "normal":
        return torch.empty(args).normal_()
    if kind == "index":  # modulus, shape...
        n = 1
        for d in args[1:]:
            n *= d
        return ((torch.arange(n) * 5) % args[0]).reshape(args[1:])
    if kind == "class":
        n = 1
        for d in args[1:]:
            n *= d
        return ((torch.arange(n) * 7) % args[0]).reshape(args[1:])
    if kind == "binary":
        n = 1
        for d in args:
            n *= d
        return (torch.arange(n) % 3 == 0).float().reshape(args)
    if kind == "prob":
        return torch.softmax(torch.empty(args).normal_(), 1)
    raise ValueError(kind)


def describe(model):
    lines = [f"P {n} {list(p.shape)}" for n, p in model.named_parameters()]
    lines += [f"B {n} {list(p.shape)}" for n, p in model.named_buffers()]
    lines += [f"S {n} {list(p.shape)}" for n, p in model.state_dict().items()]
    lines += [f"V {n} {v['version']}" for n, v in model.state_dict()._metadata.items()]
    lines += [f"M {n} {type(m).__name__}" for n, m in model.named_modules()]
    return lines


def run(case):
    torch.manual_seed(case.get("seed", 0))
    torch.rand(7)
    model = eval(case["model"])
    loss_fn = eval(case["loss"])
    x = fill(case["input"][0], case["input"][1:])
    y = fill(case["target"][0], case["target"][1:])
    result = {
        "tree": describe(model),
        "repr": repr(model),
        "init": [sha(t) for t in model.state_dict().values()],
        "init_sum": sum(t.double().sum().item() for t in model.state_dict().values()),
        "init_abs": sum(t.double().abs().sum().item() for t in model.state_dict().values()),
        "losses": [],
        "grads": [],
    }
    if x.is_floating_point():
        x.requires_grad_()
    steps = case.get("steps", 20)
    if case.get("quick") and not FULL:
        steps = case["quick"]
    model.train()
    for step in range(steps):
        x.grad = None
        model.zero_grad()
        out = model(x)
        loss = loss_fn(out, y)
        if loss.dim() > 0:
            loss = loss.mean()
        loss.backward()
        if step == 0:
            result["output"] = sha(out)
        result["grads"].append(
            hashlib.sha256(
                " ".join("-" if p.grad is None else sha(p.grad) for p in model.parameters()).encode()
            ).hexdigest()[:16]
        )
        if x.grad is not None:
            result["x_grad"] = sha(x.grad)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-LR)
        result["losses"].append(loss.item())
    model.eval()
    with torch.no_grad():
        result["eval"] = sha(model(x))
    result["final"] = [sha(t) for t in model.state_dict().values()]
    return result


def main():
    torch.set_num_threads(1)
    args = [a for a in sys.argv[1:] if not a.startswith("--")]
    cases = json.load(open(args[0]))
    if len(args) > 1:
        cases = [c for c in cases if c["name"] in args[1:]]
    results = {}
    for case in cases:
        r = run(case)
        if "--golden" in sys.argv:
            tree = hashlib.sha256("\n".join(r["tree"]).encode()).hexdigest()[:16]
            r = {
                "tree": tree,
                "repr": hashlib.sha256(r["repr"].encode()).hexdigest()[:16],
                "init_sum": r["init_sum"],
                "init_abs": r["init_abs"],
                "losses": r["losses"],
            }
        results[case["name"]] = r
    json.dump(results, sys.stdout, indent=1 if "--golden" in sys.argv else None)


main()
