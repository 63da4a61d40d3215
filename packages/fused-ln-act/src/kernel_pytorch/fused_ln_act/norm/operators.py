"""The operators of the Triton level: what `rules/norm.py` says of them, and their launchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act.rules.norm import NORM_ACT, NORM_ACT_BACKWARD


def launch() -> Callable[..., Any]:
    """The launcher of the forward."""
    from .kernels import forward

    return forward.norm_act


def launch_backward() -> Callable[..., Any]:
    """The launcher of the gradient."""
    from .kernels import backward

    return backward.norm_act_backward


norm_act_backward = declare(**NORM_ACT_BACKWARD, launch=launch_backward)
norm_act = declare(**NORM_ACT, launch=launch, backward=norm_act_backward)
