"""Triton: an operator for each function and one for their gradient, from `rules/`; PyTorch differentiates twice."""

from __future__ import annotations

from ._core.operator import declare
from .rules.rms_norm import ADD_RMS_NORM_RULES, BACKWARD_RULES, RMS_NORM_RULES

KERNELS = f"{__package__}.kernels"

rms_norm_backward = declare(**BACKWARD_RULES, launch=f"{KERNELS}.backward:rms_norm_backward")
rms_norm = declare(**RMS_NORM_RULES, launch=f"{KERNELS}.forward:rms_norm", backward=rms_norm_backward)
add_rms_norm = declare(**ADD_RMS_NORM_RULES, launch=f"{KERNELS}.forward:add_rms_norm", backward=rms_norm_backward)
