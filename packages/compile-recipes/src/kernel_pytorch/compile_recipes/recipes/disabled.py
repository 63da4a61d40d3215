"""A call that is excluded from compilation.

`torch.compiler.disable` ends the graph before the call and begins another behind it.

When not: where the compiler makes a mistake in the function: keep it, and report the mistake.
"""

import torch
from torch import Tensor, nn

from .recipe import Same

DETECTOR = "graph-break"
COUNTS = ("breaks", "graphs")


def scaled(a: Tensor) -> Tensor:
    return a * 2


excluded = torch.compiler.disable(scaled)


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return excluded(a.sin()).cos()


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        return scaled(a.sin()).cos()
