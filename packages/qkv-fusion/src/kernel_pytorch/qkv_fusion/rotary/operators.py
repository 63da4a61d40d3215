"""The operators of the Triton level: what `rules/` says of them, and their launchers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.qkv_fusion._core.operator import declare
from kernel_pytorch.qkv_fusion.rules.rotary import ROTARY_QK_IN_PLACE_RULES, ROTARY_QK_RULES

KERNELS = f"{__package__}.kernels"


def _itself(*arguments: Any) -> tuple[Tensor, Tensor]:
    """It is linear, so it is its own derivative."""
    return rotary_qk(*arguments)


rotary_qk = declare(**ROTARY_QK_RULES, launch=f"{KERNELS}.rotate:rotary_qk", backward=_itself)
rotary_qk_ = declare(**ROTARY_QK_IN_PLACE_RULES, launch=f"{KERNELS}.rotate:rotary_qk_")
