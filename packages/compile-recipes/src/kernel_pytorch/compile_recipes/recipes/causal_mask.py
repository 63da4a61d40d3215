"""The causal mask as a tensor.

The flag says the same: nothing is read for it, and half of the products are left out.

When not: where padding is hidden too.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "causal_mask"
COUNTS = ("moved",)


class Before(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


class After(Same):
    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(2, 4, 64, 16),)]
