"""CUDA C++ and its CPU backend: what kernel_pytorch.cuda_ops offers, where it is installed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.flash_attn_triton._core.cuda_level import function

_flash_attention = function("flash_attention")


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, *features: Any) -> Tensor:
    """`flash_attention` of `reference.py`, causal or full; same arguments and result dtype."""
    return _flash_attention(q, k, v, scale, causal)
