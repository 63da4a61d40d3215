"""Triton: one kernel. First derivatives are kernels too, second ones PyTorch's."""

from __future__ import annotations

from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act.rules.softmax import SOFTMAX_BACKWARD_RULES, SOFTMAX_RULES

KERNELS = f"{__package__}.kernels"

softmax_backward = declare(**SOFTMAX_BACKWARD_RULES, launch=f"{KERNELS}.backward:softmax_backward")
softmax = declare(**SOFTMAX_RULES, launch=f"{KERNELS}.forward:softmax", backward=softmax_backward)

MAPPED = {"softmax": (softmax, lambda x, scale, mask: (x, mask, scale))}
"""By function: its operator, and what converts the function's arguments to the operator's."""
