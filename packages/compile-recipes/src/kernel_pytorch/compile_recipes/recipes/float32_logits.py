"""Logits in float32.

The loss needs float32 inside, not a copy of all logits: `cross_entropy` computes in float32 by itself.

When not: where the logits are used for something else that needs float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "float32_logits"
COUNTS = ("saved",)


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4096, bias=False).bfloat16()

    def forward(self, a: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(a).float(), target)


class After(Same):
    def forward(self, a: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.before.head(a), target)


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(256, 64).bfloat16().requires_grad_(), torch.arange(256))]
