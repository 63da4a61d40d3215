"""Autocast over float32 weights.

Without gradients autocast casts the weights in every call. Weights that are stored in 16 bits are read as they are.

When not: in training, where an optimizer needs weights in float32: autocast keeps casts of a step.
"""

import copy

import torch
from torch import Tensor, nn

from .recipe import Same

DETECTOR = "cast_weights"
COUNTS = ("operators", "moved")


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))

    def forward(self, a: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return self.layers(a)


class After(Same):
    def __init__(self, before: Before) -> None:
        super().__init__(before)
        self.layers = copy.deepcopy(before.layers).bfloat16()

    def forward(self, a: Tensor) -> Tensor:
        return self.layers(a.bfloat16())
