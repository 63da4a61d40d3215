"""Triton: one kernel for both functions. First derivatives are kernels too, second ones PyTorch's."""

from __future__ import annotations

from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act.rules.bias import (
    BIAS_ACT_BACKWARD_RULES,
    BIAS_ACT_RULES,
    BIAS_DROPOUT_ADD_BACKWARD_RULES,
    BIAS_DROPOUT_ADD_RULES,
)

KERNELS = f"{__package__}.kernels"

bias_act_backward = declare(**BIAS_ACT_BACKWARD_RULES, launch=f"{KERNELS}.backward:bias_act_backward")
bias_act = declare(**BIAS_ACT_RULES, launch=f"{KERNELS}.forward:bias_act", backward=bias_act_backward)
bias_dropout_add_backward = declare(
    **BIAS_DROPOUT_ADD_BACKWARD_RULES, launch=f"{KERNELS}.backward:bias_dropout_add_backward"
)
bias_dropout_add = declare(
    **BIAS_DROPOUT_ADD_RULES, launch=f"{KERNELS}.forward:bias_dropout_add", backward=bias_dropout_add_backward
)

MAPPED = {"bias_dropout_add": (bias_dropout_add, lambda x, bias, residual, p, seed: (x, bias, residual, seed, p))}
"""By function: its operator, and what converts the function's arguments to the operator's."""
