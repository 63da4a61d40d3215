"""A dimension that changes.

The first length is compiled as a constant. Marked as dynamic, one graph serves all lengths.

When not: where there are two or three lengths: graphs for constants are faster.
"""

import torch
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "recompile"
COUNTS = ("graphs", "recompiles")


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return a.softmax(0)


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        return a.softmax(0)


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(n, 64),) for n in (3, 5, 7, 9)]


def given_after(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    a = given[0].clone()
    torch._dynamo.mark_dynamic(a, 0)
    return (a,)
