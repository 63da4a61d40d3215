"""A `torch.nn.Buffer` that a forward changes.

Assigned as an attribute, `+=` on it is not traced in torch 2.13; registered by `register_buffer`, it is.

When not: where nothing changes it.
"""

import torch
from torch import Tensor, nn

from .recipe import Same

SINCE = "2.13"
DETECTOR = "graph-break"
COUNTS = ("breaks", "graphs")


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, a: Tensor) -> Tensor:
        self.seen += 1
        return a * self.seen


class After(Same):
    def __init__(self, before: Before) -> None:
        super().__init__(before)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, a: Tensor) -> Tensor:
        self.seen += 1
        return a * self.seen
