"""Printing, logging and warning inside a forward.

What Python prints cannot be part of a graph, and a value that is printed must be waited for.

When not: while debugging in eager.
"""

from torch import Tensor, nn

from .recipe import Same

DETECTOR = "graph-break"
COUNTS = ("breaks", "graphs")


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        b = a.sin()
        print("", end="")  # noqa: T201
        return b.cos()


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        return a.sin().cos()
