"""A counter on the module.

An integer attribute is a constant of the graph: each value is a compilation, until PyTorch gives up after eight.

When not: where it changes rarely, such as once an epoch.
"""

import torch
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "recompile"
COUNTS = ("graphs", "recompiles")


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, a: Tensor) -> Tensor:
        self.calls += 1
        return a * self.calls


class After(Same):
    def __init__(self, before: Before) -> None:
        super().__init__(before)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, a: Tensor) -> Tensor:
        self.calls += 1
        return a * self.calls


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(8, 64),)] * 7
