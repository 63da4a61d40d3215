"""The same table in every layer.

A table of angles depends on nothing but the length: once in a forward is enough.

When not: where keeping it needs more memory than computing it.
"""

import torch
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "computed_again"
COUNTS = ("operators",)


def turned(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = t.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(64.0)[:, None] / 10000 ** (torch.arange(8) / 8))

    def forward(self, a: Tensor) -> Tensor:
        for _ in range(4):
            a = turned(a, self.positions.cos(), self.positions.sin())
        return a


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        cos, sin = self.before.positions.cos(), self.before.positions.sin()
        for _ in range(4):
            a = turned(a, cos, sin)
        return a


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(2, 4, 64, 16),)]
