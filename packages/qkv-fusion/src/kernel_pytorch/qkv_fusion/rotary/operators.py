"""Triton: one kernel for queries and keys, which is its own derivative."""

from __future__ import annotations

from kernel_pytorch.qkv_fusion._core.operator import OperatorCall, declare
from kernel_pytorch.qkv_fusion.rules.rotary import ROTARY_QK_IN_PLACE_RULES, ROTARY_QK_RULES

KERNELS = f"{__package__}.kernels"


# It is linear, so it is its own derivative.
rotary_qk: OperatorCall = declare(
    **ROTARY_QK_RULES, launch=f"{KERNELS}.rotate:rotary_qk", backward=lambda *a: rotary_qk(*a)
)
rotary_qk_ = declare(**ROTARY_QK_IN_PLACE_RULES, launch=f"{KERNELS}.rotate:rotary_qk_")

# A position outside of the tables gives NaN.
MAPPED = {"rotary_embedding": (rotary_qk, lambda *arguments: arguments)}
"""By function: its operator, and what converts the function's arguments to the operator's."""
