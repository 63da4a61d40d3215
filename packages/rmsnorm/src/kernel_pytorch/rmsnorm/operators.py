"""The operators of the Triton level: what `rules/` says of them, and their launchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._core.operator import declare
from .rules.rms_norm import ADD_RMS_NORM, BACKWARD, RMS_NORM


def launch() -> Callable[..., Any]:
    """The launcher of the norm."""
    from .kernels import forward

    return forward.rms_norm


def launch_add() -> Callable[..., Any]:
    """The launcher of the norm with the residual stream."""
    from .kernels import forward

    return forward.add_rms_norm


def launch_backward() -> Callable[..., Any]:
    """The launcher of the gradient of both."""
    from .kernels import backward

    return backward.rms_norm_backward


rms_norm_backward = declare(**BACKWARD, launch=launch_backward)
rms_norm = declare(**RMS_NORM, launch=launch, backward=rms_norm_backward)
add_rms_norm = declare(**ADD_RMS_NORM, launch=launch_add, backward=rms_norm_backward)
