"""Triton: one kernel for all functions. First derivatives are kernels too, second ones PyTorch's."""

from __future__ import annotations

from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act.rules.norm import NORM_ACT_BACKWARD_RULES, NORM_ACT_RULES

KERNELS = f"{__package__}.kernels"

norm_act_backward = declare(**NORM_ACT_BACKWARD_RULES, launch=f"{KERNELS}.backward:norm_act_backward")
norm_act = declare(**NORM_ACT_RULES, launch=f"{KERNELS}.forward:norm_act", backward=norm_act_backward)

MAPPED = {
    "layer_norm": (
        norm_act,
        lambda x, weight, bias, eps: (x, None, weight, bias, None, eps, 0.0, "layer", "identity"),
    ),
    "add_layer_norm": (
        norm_act,
        lambda x, residual, weight, bias, eps, p, seed: (x, residual, weight, bias, seed, eps, p, "layer", "identity"),
    ),
    "layer_norm_act": (
        norm_act,
        lambda x, weight, bias, eps, act, p, seed: (x, None, weight, bias, seed, eps, p, "layer", act),
    ),
    "add_layer_norm_act": (
        norm_act,
        lambda x, residual, weight, bias, eps, act, p, seed: (x, residual, weight, bias, seed, eps, p, "layer", act),
    ),
    "rms_norm_act": (
        norm_act,
        lambda x, weight, eps, act, p, seed: (x, None, weight, None, seed, eps, p, "rms", act),
    ),
    "add_rms_norm_act": (
        norm_act,
        lambda x, residual, weight, eps, act, p, seed: (x, residual, weight, None, seed, eps, p, "rms", act),
    ),
}
"""By function: its operator, and what converts the function's arguments to the operator's."""
