"""A context manager that does what cannot be traced.

What happens inside `with` cannot be split, so the whole function runs in eager. PyTorch's own contexts are traced.

When not: around the call of a compiled model.
"""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .recipe import Same

DETECTOR = "graph-break"
COUNTS = ("breaks",)


@contextlib.contextmanager
def span() -> Iterator[None]:
    with open(os.devnull, "w") as file:
        file.write("begin")
    yield


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        with span():
            a = a.sin()
        return a + 1


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        with torch.profiler.record_function("span"):
            a = a.sin()
        return a + 1
