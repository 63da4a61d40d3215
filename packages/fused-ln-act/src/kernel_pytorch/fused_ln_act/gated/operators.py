"""The operators of the Triton level: what `rules/gated.py` says of them, and their launchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act.rules.gated import GATED, GATED_BACKWARD


def launch() -> Callable[..., Any]:
    """The launcher of the forward."""
    from .kernels import forward

    return forward.gated


def launch_backward() -> Callable[..., Any]:
    """The launcher of the gradient."""
    from .kernels import backward

    return backward.gated_backward


gated_backward = declare(**GATED_BACKWARD, launch=launch_backward)
gated = declare(**GATED, launch=launch, backward=gated_backward)
