"""The product of queries, keys and values, which every level leaves to cuBLAS, and the views that attention reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv_projection` of `levels/reference.py`: one product, and three views of it."""
    heads = F.linear(x, weight, bias).unflatten(-1, (num_heads + 2 * num_kv_heads, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), -2)
    return q, k, v


def projected(qk_norm_rope: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`qkv_norm_rope` of `levels/reference.py`, of a level's function that normalises and rotates q and k."""

    def qkv_norm_rope(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias, q_weight, k_weight, cos, sin, position_ids, num_heads, num_kv_heads, *scalars = arguments
        q, k, v = project(x, weight, bias, num_heads, num_kv_heads, q_weight.shape[0])
        q, k = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, position_ids, *scalars)
        return q, k, v

    return qkv_norm_rope
