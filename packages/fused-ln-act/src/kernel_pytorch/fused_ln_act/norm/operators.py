"""The operators of the Triton level: what `rules/norm.py` says of them, and their launchers."""

from __future__ import annotations

from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act.rules.norm import NORM_ACT_BACKWARD_RULES, NORM_ACT_RULES

KERNELS = f"{__package__}.kernels"

norm_act_backward = declare(**NORM_ACT_BACKWARD_RULES, launch=f"{KERNELS}.backward:norm_act_backward")
norm_act = declare(**NORM_ACT_RULES, launch=f"{KERNELS}.forward:norm_act", backward=norm_act_backward)
