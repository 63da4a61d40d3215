"""A branch on data.

Python must know the value before it can take a branch, so the graph ends there, and the GPU is waited for.

When not: where one branch is expensive and rare: a break costs less than computing both.
"""

import torch
from torch import Tensor, nn

from .recipe import Same

DETECTOR = "graph-break"
COUNTS = ("breaks", "graphs")


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return a.relu() if a.sum() > 0 else a - 1


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        return torch.where(a.sum() > 0, a.relu(), a - 1)
