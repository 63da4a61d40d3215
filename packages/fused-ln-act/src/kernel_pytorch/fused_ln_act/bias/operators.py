"""The operators of the Triton level: what `rules/bias.py` says of them, and their launchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act.rules.bias import (
    BIAS_ACT,
    BIAS_ACT_BACKWARD,
    BIAS_DROPOUT_ADD,
    BIAS_DROPOUT_ADD_BACKWARD,
)


def launch() -> Callable[..., Any]:
    """The launcher of `bias_act`."""
    from .kernels import forward

    return forward.bias_act


def launch_add() -> Callable[..., Any]:
    """The launcher of `bias_dropout_add`."""
    from .kernels import forward

    return forward.bias_dropout_add


def launch_backward() -> Callable[..., Any]:
    """The launcher of the gradient of `bias_act`."""
    from .kernels import backward

    return backward.bias_act_backward


def launch_add_backward() -> Callable[..., Any]:
    """The launcher of the gradient of `bias_dropout_add`."""
    from .kernels import backward

    return backward.bias_dropout_add_backward


bias_act_backward = declare(**BIAS_ACT_BACKWARD, launch=launch_backward)
bias_act = declare(**BIAS_ACT, launch=launch, backward=bias_act_backward)
bias_dropout_add_backward = declare(**BIAS_DROPOUT_ADD_BACKWARD, launch=launch_add_backward)
bias_dropout_add = declare(**BIAS_DROPOUT_ADD, launch=launch_add, backward=bias_dropout_add_backward)
