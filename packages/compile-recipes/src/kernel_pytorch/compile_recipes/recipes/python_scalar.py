"""A Python number as an argument.

The first number is a constant of the graph, and the next one compiles it again.

When not: where it never changes: a constant is faster.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "recompile"
COUNTS = ("graphs", "recompiles")


class Before(nn.Module):
    def forward(self, a: Tensor, t: float) -> Tensor:
        return a * t


class After(Same):
    def forward(self, a: Tensor, t: Tensor) -> Tensor:
        return a * t


def inputs() -> list[tuple[Any, ...]]:
    return [(x(8, 64), 0.1 * i) for i in range(1, 6)]


def given_after(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return given[0], torch.tensor(given[1])
