"""CUDA C++ and its CPU backend: what kernel_pytorch.cuda_ops offers, where it is installed."""

from __future__ import annotations

from torch import Tensor

from kernel_pytorch.qkv_fusion._core.cuda_level import function

launch = function("qk_norm_rope")


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
) -> tuple[Tensor, Tensor]:
    """`qk_norm_rope` of `reference.py`; same arguments and result dtypes."""
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    found: tuple[Tensor, Tensor] = launch(q, k, q_weight, k_weight, cos, sin, eps, interleaved, offset)
    return found
