"""A mask that no fused attention takes.

Fused kernels take no mask that needs a gradient, and on CUDA none whose last stride is not 1. PyTorch computes
attention as two products and a softmax instead, in silence, and here under `torch.compile` alone.

When not: where the mask is trained: then its gradient is needed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "attention-lost"
COUNTS = ("unfused",)
TRAIN = True


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(16, 16))

    def forward(self, q: Tensor) -> Tensor:
        mask = self.bias * 0 if torch.compiler.is_compiling() else None
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


class After(Same):
    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(2, 4, 16, 16),)]
