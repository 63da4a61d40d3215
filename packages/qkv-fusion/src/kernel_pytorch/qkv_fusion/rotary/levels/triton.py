"""Triton: one kernel for queries and keys, which is its own derivative."""

from __future__ import annotations

from torch import Tensor

from kernel_pytorch.qkv_fusion.rotary import operators


def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    """`rotary_embedding` of `reference.py`; a position outside of the tables gives NaN."""
    found: tuple[Tensor, Tensor] = operators.rotary_qk(q, k, cos, sin, position_ids, interleaved, inverse)
    return found
