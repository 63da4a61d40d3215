"""Keys and values repeated for grouped heads.

The copies are written and read again. `enable_gqa=True` reads each head where it lies.

When not: where the kernel of the device has no grouped heads: look at the report's line about attention.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "repeated_heads"
COUNTS = ("moved",)


class Before(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(4, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v)


class After(Same):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(2, 8, 64, 16), x(2, 2, 64, 16), x(2, 2, 64, 16))]
