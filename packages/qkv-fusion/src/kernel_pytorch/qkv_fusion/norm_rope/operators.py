"""The operators of the Triton level: what `rules/` says of them, and their launchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_pytorch.qkv_fusion._core.operator import declare
from kernel_pytorch.qkv_fusion.rules.norm_rope import (
    BACKWARD,
    LAYER_BACKWARD,
    NORM_ROPE_CACHE,
    QK_LAYER_NORM_ROPE,
    QK_NORM_ROPE,
)


def launch() -> Callable[..., Any]:
    """The launcher of the norm and the rotation."""
    from .kernels import forward

    return forward.qk_norm_rope


def launch_backward() -> Callable[..., Any]:
    """The launcher of the gradients."""
    from .kernels import backward

    return backward.qk_norm_rope_backward


def launch_layer() -> Callable[..., Any]:
    """The launcher of LayerNorm and the rotation."""
    from .kernels import forward

    return forward.qk_layer_norm_rope


def launch_layer_backward() -> Callable[..., Any]:
    """The launcher of their gradients."""
    from .kernels import backward

    return backward.qk_layer_norm_rope_backward


def launch_cache() -> Callable[..., Any]:
    """The launcher that writes keys and values into a cache."""
    from .kernels import cache

    return cache.norm_rope_cache_


qk_norm_rope_backward = declare(**BACKWARD, launch=launch_backward)
qk_norm_rope = declare(**QK_NORM_ROPE, launch=launch, backward=qk_norm_rope_backward)
qk_layer_norm_rope_backward = declare(**LAYER_BACKWARD, launch=launch_layer_backward)
qk_layer_norm_rope = declare(**QK_LAYER_NORM_ROPE, launch=launch_layer, backward=qk_layer_norm_rope_backward)
norm_rope_cache_ = declare(**NORM_ROPE_CACHE, launch=launch_cache)
