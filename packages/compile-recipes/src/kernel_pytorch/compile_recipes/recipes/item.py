"""A value that leaves its tensor.

`.item()`, `.tolist()` and `float()` wait for the GPU and end the graph; arithmetic on a tensor of one element does
not.

When not: for what Python must know, such as a log once in a thousand steps: do it outside the compiled part.
"""

from torch import Tensor, nn

from .recipe import Same

DETECTOR = "graph-break"
COUNTS = ("breaks", "graphs")


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        scale = 1 / a.norm().item()
        return a * scale


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        return a * (1 / a.norm())
