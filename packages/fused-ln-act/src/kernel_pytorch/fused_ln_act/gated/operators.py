"""Triton: one kernel for all activations. First derivatives are a kernel too, second ones PyTorch's.

`gated_linear` is `gated` and the linear layer behind it. Called separately, the two save gate, up and the input of the
layer, `(..., I)` each; `gated_linear` saves only gate and up, and the backward's kernel recomputes the layer's input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.fused_ln_act._core.gradients import asks
from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act._core.registration import arguments_class
from kernel_pytorch.fused_ln_act.linear.operators import gradient_of_input, gradient_of_weight
from kernel_pytorch.fused_ln_act.rules import gated as rules
from kernel_pytorch.fused_ln_act.rules.activations import FLOPS
from kernel_pytorch.fused_ln_act.rules.gated import GATED_BACKWARD_RULES, GATED_RULES

KERNELS = f"{__package__}.kernels"

gated_backward = declare(**GATED_BACKWARD_RULES, launch=f"{KERNELS}.backward:gated_backward")
gated = declare(**GATED_RULES, launch=f"{KERNELS}.forward:gated", backward=gated_backward)


# `gated` followed by a linear layer. It has no sharding rule: with DTensors, call the two operators separately.


of_gated = arguments_class(gated_backward.operator._schema)


def fake_linear_backward(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What it allocates."""
    return (a.dh.new_empty(a.dh.shape), *rules.fake_backward(of_gated(*a)))


def formula_linear(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients in PyTorch that autograd can follow."""
    return gated(a.gate, a.up, a.activation, a.alpha, a.limit, a.offset), *rules.formula(of_gated(*a))


def flops_linear_backward(dh: Any, gate: Any, up: Any, activation: str, *_: Any, **__: Any) -> int:
    """Those of the gradients, and of h once more: the product of the activation with up."""
    return rules.flops_backward(dh, gate, up, activation) + torch.Size(dh).numel()


gated_linear_backward = declare(
    "gated_linear_backward(Tensor dh, Tensor gate, Tensor up, str activation, float alpha, float? limit,"
    " float offset, bool need_dgate, bool need_dup) -> (Tensor h, Tensor dgate, Tensor dup)",
    launch=f"{KERNELS}.backward:gated_linear_backward",
    fake=fake_linear_backward,
    formula=formula_linear,
    flops=flops_linear_backward,
)


def fake_linear(gate: Tensor, up: Tensor, weight: Tensor, *scalars: Any) -> Tensor:
    """What it allocates."""
    return F.linear(gate, weight)


@asks("dy gate up weight activation alpha limit offset needs")
def gradient_linear(*given: Any) -> tuple[Tensor | None, ...]:
    """Gradients of gate, up and the weight, each only if it is needed."""
    dy, gate, up, weight, *scalars, needs = given
    *halves, need_weight = needs
    if not any(halves):
        return None, None, gradient_of_weight(dy, gated(gate, up, *scalars))
    dh = gradient_of_input(dy, weight)
    if not need_weight:
        return *gated_backward(dh, gate, up, *scalars, *halves), None
    h, *gradients = gated_linear_backward(dh, gate, up, *scalars, *halves)
    return *gradients, gradient_of_weight(dy, h)


def flops_linear(gate: Any, up: Any, weight: Any, activation: str, *_: Any, **__: Any) -> int:
    """What makes h, and the product."""
    rows, (outputs, hidden) = torch.Size(gate[:-1]).numel(), weight
    return rows * hidden * (FLOPS[activation][0] + 1 + 2 * outputs)


gated_linear = declare(
    "gated_linear(Tensor gate, Tensor up, Tensor weight, str activation, float alpha, float? limit, float offset)"
    " -> Tensor",
    launch=f"{KERNELS}.forward:gated_linear",
    fake=fake_linear,
    gradient=gradient_linear,
    flops=flops_linear,
)

GELU = {"none": "gelu", "tanh": "gelu_tanh"}
MAPPED = {
    "swiglu": (gated, lambda gate, up, alpha, limit, offset: (gate, up, "silu", alpha, limit, offset)),
    "geglu": (gated, lambda gate, up, approximate, limit: (gate, up, GELU[approximate], 1.0, limit, 0.0)),
    "reglu": (gated, lambda gate, up, limit: (gate, up, "relu", 1.0, limit, 0.0)),
}
"""By function: its operator, and what converts the function's arguments to the operator's."""
