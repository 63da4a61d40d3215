"""The product of queries, keys and values, which every level leaves to cuBLAS, and the views that attention reads."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv_projection` of `levels/reference.py`: one product, and three views of it."""
    heads = F.linear(x, weight, bias).unflatten(-1, (num_heads + 2 * num_kv_heads, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), -2)
    return q, k, v
