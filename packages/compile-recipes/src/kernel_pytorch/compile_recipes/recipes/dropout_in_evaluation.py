"""Dropout that is active in evaluation.

`F.dropout` drops by default. In evaluation that costs three passes, and makes results random.

When not: where uncertainty is sampled on purpose.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recipe import Same

DETECTOR = "setting"
COUNTS = ("operators",)


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return F.dropout(a.sin(), 0.5)


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        return F.dropout(a.sin(), 0.5, training=self.training)


def result_of(result: Tensor, given: tuple[Tensor, ...]) -> Tensor:
    return torch.where(result == 0, given[0].sin(), result / 2)  # without what was dropped
