"""Convolutions in the contiguous layout.

Tensor cores read channels last; in the other layout each convolution is surrounded by transpositions.

When not: for convolutions of few channels, and in models that are mostly something else.
"""

import copy

import torch
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "channels_last"
COUNTS = ("contiguous",)


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))

    def forward(self, a: Tensor) -> Tensor:
        return self.layers(a)


class After(Same):
    def __init__(self, before: Before) -> None:
        super().__init__(before)
        self.layers = copy.deepcopy(before.layers).to(memory_format=torch.channels_last)

    def forward(self, a: Tensor) -> Tensor:
        return self.layers(a.contiguous(memory_format=torch.channels_last))


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(2, 8, 16, 16),)]
