"""A loop over the rows of a tensor.

The loop is unrolled: one launch for each row, and a graph that grows with the batch.

When not: where each row needs another operator.
"""

import torch
from torch import Tensor, nn

from .recipe import Same

DETECTOR = "loop"
COUNTS = ("operators",)


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return torch.stack([row.softmax(-1) for row in a])


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        return a.softmax(-1)
