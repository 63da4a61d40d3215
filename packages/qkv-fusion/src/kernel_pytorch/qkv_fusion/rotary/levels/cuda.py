"""CUDA C++ and its CPU backend: what kernel_pytorch.cuda_ops offers where it is installed, one tensor at a time."""

from __future__ import annotations

from torch import Tensor

from kernel_pytorch.qkv_fusion._core.cuda_level import function

rotate = function("rotary_embedding")


def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    """`rotary_embedding` of `reference.py`; same arguments and result dtypes."""
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    return rotate(q, cos, sin, interleaved, inverse), rotate(k, cos, sin, interleaved, inverse)
