"""Timing inside a forward.

A clock is no operator, and on a GPU it measures the launch alone. `record_function` marks a range for the profiler.

When not: in eager code that synchronises on purpose.
"""

import time

import torch
from torch import Tensor, nn

from .recipe import Same

DETECTOR = "graph-break"
COUNTS = ("breaks", "graphs")


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        begin = time.perf_counter()
        a = a.sin()
        self.seconds = time.perf_counter() - begin
        return a + 1


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        with torch.profiler.record_function("sin"):
            a = a.sin()
        return a + 1
