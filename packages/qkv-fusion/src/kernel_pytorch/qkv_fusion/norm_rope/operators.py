"""Triton: one kernel for queries and keys. First derivatives are kernels too, second ones PyTorch's."""

from __future__ import annotations

from typing import Any

from kernel_pytorch.qkv_fusion._core.operator import declare
from kernel_pytorch.qkv_fusion.rules.norm_rope import (
    BACKWARD_RULES,
    LAYER_BACKWARD_RULES,
    NORM_ROPE_CACHE_RULES,
    QK_LAYER_NORM_ROPE_RULES,
    QK_NORM_ROPE_RULES,
)

KERNELS = f"{__package__}.kernels"

qk_norm_rope_backward = declare(**BACKWARD_RULES, launch=f"{KERNELS}.backward:qk_norm_rope_backward")
qk_norm_rope = declare(**QK_NORM_ROPE_RULES, launch=f"{KERNELS}.forward:qk_norm_rope", backward=qk_norm_rope_backward)
qk_layer_norm_rope_backward = declare(**LAYER_BACKWARD_RULES, launch=f"{KERNELS}.backward:qk_layer_norm_rope_backward")
qk_layer_norm_rope = declare(
    **QK_LAYER_NORM_ROPE_RULES, launch=f"{KERNELS}.forward:qk_layer_norm_rope", backward=qk_layer_norm_rope_backward
)
norm_rope_cache_ = declare(**NORM_ROPE_CACHE_RULES, launch=f"{KERNELS}.cache:norm_rope_cache_")


def arguments_of(*given: Any) -> tuple[Any, ...]:
    """The arguments of an operator, made of those of `levels/reference.py`: rows of the tables are looked up."""
    q, k, q_weight, k_weight, cos, sin, position_ids, *scalars = given
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    return q, k, q_weight, k_weight, cos, sin, *scalars


MAPPED = {"qk_norm_rope": (qk_norm_rope, arguments_of), "qk_layer_norm_rope": (qk_layer_norm_rope, arguments_of)}
"""By function: its operator, and what converts the function's arguments to the operator's."""
