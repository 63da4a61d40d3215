"""The operators of the Triton level: what `rules/softmax.py` says of them, and their launchers."""

from __future__ import annotations

from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act.rules.softmax import SOFTMAX_BACKWARD_RULES, SOFTMAX_RULES

KERNELS = f"{__package__}.kernels"

softmax_backward = declare(**SOFTMAX_BACKWARD_RULES, launch=f"{KERNELS}.backward:softmax_backward")
softmax = declare(**SOFTMAX_RULES, launch=f"{KERNELS}.forward:softmax", backward=softmax_backward)
