"""The operators of the Triton level: what `rules/softmax.py` says of them, and their launchers."""

from __future__ import annotations

from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act.rules.softmax import SOFTMAX, SOFTMAX_BACKWARD

KERNELS = f"{__package__}.kernels"

softmax_backward = declare(**SOFTMAX_BACKWARD, launch=f"{KERNELS}.backward:softmax_backward")
softmax = declare(**SOFTMAX, launch=f"{KERNELS}.forward:softmax", backward=softmax_backward)
