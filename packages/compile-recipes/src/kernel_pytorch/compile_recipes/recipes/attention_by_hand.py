"""Attention written out.

Scores and weights of all pairs of tokens are written, read and kept for the backward; one call keeps none of them.

When not: where the weights themselves are wanted.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "attention"
COUNTS = ("operators", "saved")


class Before(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 0.25).softmax(-1) @ v


class After(Same):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def inputs() -> list[tuple[Tensor, ...]]:
    return [tuple(x(2, 4, 128, 16).requires_grad_() for _ in range(3))]
