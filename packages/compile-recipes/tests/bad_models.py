"""Models with planted faults. A comment `# PLANT name` stands on the line that a report must name."""

import logging
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

LOG = logging.getLogger("bad_models")
LOG.disabled = True


def plants(cls):
    """(line, name) of each plant in the source of a class and of the helpers that it names."""
    import inspect

    found = []
    for thing in (cls, *getattr(cls, "HELPERS", ())):
        lines, start = inspect.getsourcelines(thing)
        found += [
            (start + i, line.partition("# PLANT ")[2].split()[0]) for i, line in enumerate(lines) if "# PLANT " in line
        ]
    return found


def describe(x):
    print("mean", x.shape)  # PLANT printing  # noqa: T201
    return x


@torch.compiler.disable
def fallback(x):
    return x + 1


class Script(nn.Module):
    """As somebody writes who came from NumPy: one long forward."""

    HELPERS = (describe,)

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 600, bias=False)

    def forward(self, x, target):
        x = self.body(x)
        if x.abs().max() > 1e6:  # PLANT branch_on_data
            x = x * 0.5
        x = x / x.norm().item()  # PLANT item
        x = describe(x)
        x = x + x[x > 0].mean()  # PLANT mask_indexing
        LOG.warning("seen %s", x.shape)  # PLANT printing
        x = fallback(x)  # PLANT disabled
        begin = time.perf_counter()  # PLANT timer
        x = x * np.random.uniform(1.0, 1.0)  # PLANT python_random
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)  # PLANT rms_norm
        self.seconds = begin
        return F.cross_entropy(self.head(x), target)  # PLANT loss

    @staticmethod
    def inputs():
        return torch.randn(8, 16), torch.randint(0, 600, (8,))


class Attention(nn.Module):
    """As in a paper's first repository: modules, and attention by hand."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.calls = 0
        self.seen = nn.Buffer(torch.zeros(()))
        self.scale = nn.Parameter(torch.rand(32) + 0.5)

    def heads(self, x):
        return x.unflatten(-1, (4, 8)).transpose(1, 2)

    def forward(self, x):
        self.calls += 1  # PLANT module_counter
        self.seen += 1  # PLANT nn_buffer
        x = x * (1 + 0 * self.calls)
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))  # PLANT shared_linear
        weights = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1)
        y = weights @ v  # PLANT attention
        x = x + self.o(y.transpose(1, 2).flatten(-2))
        h = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.scale  # PLANT rms_norm
        act = self.gate(h)  # PLANT shared_linear
        h = act * torch.sigmoid(act) * self.up(h)  # PLANT gated_mlp
        x = x + self.down(h)
        limit = x.abs().amax().tolist()  # PLANT item
        assert limit < 1e6
        print("done", end="")  # PLANT printing  # noqa: T201
        return x.masked_select(x > 0).sum()  # PLANT mask_indexing

    @staticmethod
    def inputs():
        return (torch.randn(2, 8, 32),)


class Vision(nn.Module):
    """As a trainer's callback grows into a model: hooks, seeds, contexts, gradients inside."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.mlp = nn.Linear(8, 32)
        self.head = nn.Linear(32, 10)
        self.rot = nn.Parameter(torch.rand(8))

    def forward(self, x):
        torch.manual_seed(0)  # PLANT python_random
        x = self.norm(self.conv(x))
        x = x + torch.randn_like(x) * 0.01
        x = x.flatten(2).transpose(1, 2)
        y = x - x.mean(-1, keepdim=True)
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()  # PLANT layer_norm
        h = self.mlp(y)
        h = 0.5 * h * (1 + torch.erf(h * 0.7071067811865476))  # PLANT activation
        if (h > 100).any():  # PLANT branch_on_data
            h = h.clamp(max=100)
        print(h.shape, end="")  # PLANT printing  # noqa: T201
        n = int(h.sum())  # PLANT item
        h = h * (1 + 0 * n)
        if h.data_ptr() == 0:  # PLANT data_ptr
            h = h + 1
        begin = time.time()  # PLANT timer
        kept = torch.nonzero(h.amax((0, 2)) > -1e9).flatten()  # PLANT mask_indexing
        self.seconds = begin
        LOG.info("kept %s", kept.shape)  # PLANT printing
        return self.head(h.mean(1))

    @staticmethod
    def inputs():
        return (torch.randn(2, 3, 8, 8),)


MODELS = (Script, Attention, Vision)
