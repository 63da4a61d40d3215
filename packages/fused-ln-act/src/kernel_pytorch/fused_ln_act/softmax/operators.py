"""The operators of the Triton level: what `rules/softmax.py` says of them, and their launchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act.rules.softmax import SOFTMAX, SOFTMAX_BACKWARD


def launch() -> Callable[..., Any]:
    """The launcher of the forward."""
    from .kernels import forward

    return forward.softmax


def launch_backward() -> Callable[..., Any]:
    """The launcher of the gradient."""
    from .kernels import backward

    return backward.softmax_backward


softmax_backward = declare(**SOFTMAX_BACKWARD, launch=launch_backward)
softmax = declare(**SOFTMAX, launch=launch, backward=softmax_backward)
