"""Padding that is computed.

A layer computes every position, also those that a mask hides. Packed into one row, only real tokens are computed.

When not: where lengths differ little, or batches are sorted by length.
"""

import torch
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "padding"
COUNTS = ("flops", "moved")
NAMED = ("a", "attention_mask")
LENGTHS = (5, 9, 31, 64)


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, a: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layer(a) * attention_mask[..., None]


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        return self.before.layer(a)


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(4, 64, 64), (torch.arange(64) < torch.tensor(LENGTHS)[:, None]).float())]


def given_after(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (given[0][given[1].bool()],)


def result_of(before: Tensor, given: tuple[Tensor, ...]) -> Tensor:
    return before[given[1].bool()]
