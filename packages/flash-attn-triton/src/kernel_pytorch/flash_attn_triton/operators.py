"""The operators of the Triton level: what `rules/` says of them, and their launchers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._core.operator import declare
from .rules.decode import FLASH_DECODE
from .rules.triton import BACKWARD, FLASH_ATTENTION


def launch() -> Callable[..., Any]:
    """The launcher of attention."""
    from .kernels import forward

    return forward.flash_attention


def launch_backward() -> Callable[..., Any]:
    """The launcher of the gradients."""
    from .kernels import backward

    return backward.flash_attention_backward


def launch_decode() -> Callable[..., Any]:
    """The launcher of attention to a cache."""
    from .kernels import decode

    return decode.flash_decode


flash_attention_backward = declare(**BACKWARD, launch=launch_backward)
flash_attention = declare(**FLASH_ATTENTION, launch=launch, backward=flash_attention_backward)
flash_decode = declare(**FLASH_DECODE, launch=launch_decode)
