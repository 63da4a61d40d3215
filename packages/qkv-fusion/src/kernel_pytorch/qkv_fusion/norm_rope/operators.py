"""The operators of the Triton level: what `rules/` says of them, and their launchers."""

from __future__ import annotations

from kernel_pytorch.qkv_fusion._core.operator import declare
from kernel_pytorch.qkv_fusion.rules.norm_rope import (
    BACKWARD,
    LAYER_BACKWARD,
    NORM_ROPE_CACHE,
    QK_LAYER_NORM_ROPE,
    QK_NORM_ROPE,
)

KERNELS = f"{__package__}.kernels"

qk_norm_rope_backward = declare(**BACKWARD, launch=f"{KERNELS}.backward:qk_norm_rope_backward")
qk_norm_rope = declare(**QK_NORM_ROPE, launch=f"{KERNELS}.forward:qk_norm_rope", backward=qk_norm_rope_backward)
qk_layer_norm_rope_backward = declare(**LAYER_BACKWARD, launch=f"{KERNELS}.backward:qk_layer_norm_rope_backward")
qk_layer_norm_rope = declare(
    **QK_LAYER_NORM_ROPE, launch=f"{KERNELS}.forward:qk_layer_norm_rope", backward=qk_layer_norm_rope_backward
)
norm_rope_cache_ = declare(**NORM_ROPE_CACHE, launch=f"{KERNELS}.cache:norm_rope_cache_")
