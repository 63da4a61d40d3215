"""Indexing by a mask.

How many elements a mask selects is data, so the shape of the result is unknown and the graph ends.

When not: where few of many elements are selected and the work on them is large: then selecting first pays.
"""

from torch import Tensor, nn

from .recipe import Same

DETECTOR = "graph-break"
COUNTS = ("breaks", "graphs")


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return a[a > 0].sum()


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        return a.where(a > 0, 0).sum()
