"""Triton: one kernel for queries and keys, which is its own derivative."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.qkv_fusion._core.operation import calls
from kernel_pytorch.qkv_fusion.rotary import operators


@calls(operators.rotary_qk)
def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, interleaved: bool, inverse: bool
) -> tuple[Any, ...]:
    """`rotary_embedding` of `reference.py`; a position outside of the tables gives NaN."""
    return q, k, cos, sin, position_ids, interleaved, inverse
