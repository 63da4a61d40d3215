"""The best that PyTorch itself offers: one product, then `qk_norm_rope` at level "native" too."""

from __future__ import annotations

from torch import Tensor

from kernel_pytorch.qkv_fusion.norm_rope.levels.native import qk_norm_rope
from kernel_pytorch.qkv_fusion.projection.project import project

qkv_projection = project


def qkv_norm_rope(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    interleaved: bool,
    offset: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv_norm_rope` of `reference.py`; same arguments and result dtypes."""
    q, k, v = project(x, weight, bias, num_heads, num_kv_heads, q_weight.shape[0])
    q, k = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, position_ids, eps, interleaved, offset)
    return q, k, v
