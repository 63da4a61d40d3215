"""Comparing addresses.

Addresses do not exist while a graph is traced.

When not: outside of a forward.
"""

from torch import Tensor, nn

from .recipe import Same

DETECTOR = "graph-break"
COUNTS = ("breaks",)


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        a = a.sin()
        return a + 1 if a.data_ptr() != 0 else a


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        return a.sin() + 1
