"""Triton: one kernel for queries and keys. First derivatives are kernels too, second ones PyTorch's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.qkv_fusion._core.operation import calls, first_two
from kernel_pytorch.qkv_fusion.norm_rope import operators


@calls(operators.qk_norm_rope, first_two)
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    eps: float,
    interleaved: bool,
    offset: float,
) -> tuple[Any, ...]:
    """`qk_norm_rope` of `reference.py`; same arguments and result dtypes."""
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    return q, k, q_weight, k_weight, cos, sin, eps, interleaved, offset


@calls(operators.qk_layer_norm_rope, first_two)
def qk_layer_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    eps: float,
    interleaved: bool,
    offset: float,
) -> tuple[Any, ...]:
    """`qk_layer_norm_rope` of `reference.py`; same arguments and result dtypes."""
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    return q, k, q_weight, k_weight, cos, sin, eps, interleaved, offset
