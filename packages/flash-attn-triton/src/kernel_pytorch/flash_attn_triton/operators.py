"""The operators of the Triton level: what `rules/` says of them, and their launchers."""

from __future__ import annotations

from ._core.operator import declare
from .rules.decode import FLASH_DECODE_RULES
from .rules.triton import BACKWARD_RULES, FLASH_ATTENTION_RULES

KERNELS = f"{__package__}.kernels"

flash_attention_backward = declare(**BACKWARD_RULES, launch=f"{KERNELS}.backward:flash_attention_backward")
flash_attention = declare(
    **FLASH_ATTENTION_RULES, launch=f"{KERNELS}.forward:flash_attention", backward=flash_attention_backward
)
flash_decode = declare(**FLASH_DECODE_RULES, launch=f"{KERNELS}.decode:flash_decode")
