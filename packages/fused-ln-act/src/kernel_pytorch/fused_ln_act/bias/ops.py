"""The operators `torch.ops.kernel_pytorch.{bias_act, bias_act_backward}`: `residual + dropout(activation(x + bias))`.

One pair serves both functions of this group: what is there is said by arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act import flops
from kernel_pytorch.fused_ln_act import sharding as registered
from kernel_pytorch.fused_ln_act.activations import ACTIVATIONS
from kernel_pytorch.fused_ln_act.direct_calls import check_floats, check_memory
from kernel_pytorch.fused_ln_act.dispatch import implement, library

from . import sharding

library.define(
    "bias_act(Tensor x, Tensor? bias, Tensor? residual, Tensor? seed, float dropout_p, str activation) -> Tensor"
)
library.define(
    "bias_act_backward(Tensor dy, Tensor? x, Tensor? bias, Tensor? seed, float dropout_p, str activation,"
    " bool need_dx, bool need_dbias) -> (Tensor dx, Tensor dbias)"
)


def _check(
    x: Tensor, like_x: dict[str, Tensor | None], bias: Tensor | None, seed: Tensor | None, dropout_p: float,
    activation: str,
) -> None:  # fmt: skip
    """Whoever calls an operator directly passes no other check, and a wrong shape would read foreign memory."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: given {activation!r}; allowed are {', '.join(map(repr, ACTIVATIONS))}")
    check_floats(x=x, bias=bias)
    check_floats(**like_x)
    for name, tensor in like_x.items():
        if tensor is not None and tensor.shape != x.shape:
            raise ValueError(f"{name}: shape is {tuple(tensor.shape)}; it must be that of x, {tuple(x.shape)}")
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias: shape is {tuple(bias.shape)}; for x of {tuple(x.shape)} it must be its end")
    if dropout_p != 0.0 and (seed is None or seed.dtype != torch.int64 or seed.dim() != 0):
        raise ValueError(f"seed: given {seed}; with dropout_p {dropout_p} it must be an int64 tensor of shape ()")
    if seed is not None:
        check_memory("seed", seed)


def launch_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, dropout_p: float, activation: str
) -> Tensor:
    """`y` from the Triton kernel."""
    from . import triton_forward

    _check(x, {"residual": residual}, bias, seed, dropout_p, activation)
    return triton_forward.forward(x, bias, residual, seed, dropout_p, activation)


def launch_backward(
    dy: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    activation: str,
    need_dx: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor]:
    """`(dx, dbias)` from the Triton kernels; what is not needed comes back empty."""
    from . import triton_backward

    _check(dy, {"x": x}, bias, seed, dropout_p, activation)
    if x is None and activation != "identity":
        raise ValueError(f"x: given None; the derivative of {activation!r} needs it")
    return triton_backward.backward(dy, x, bias, seed, dropout_p, activation, need_dx, need_dbias)


implement("bias_act", launch_forward)
implement("bias_act_backward", launch_backward)


# Fakes: exactly what the launchers allocate, contiguous whatever the strides of the inputs.


@torch.library.register_fake("kernel_pytorch::bias_act", lib=library)
def _(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, dropout_p: float, activation: str
) -> Tensor:
    return x.new_empty(x.shape, dtype=x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))


@torch.library.register_fake("kernel_pytorch::bias_act_backward", lib=library)
def _(
    dy: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    activation: str,
    need_dx: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor]:
    dx = dy.new_empty(dy.shape if need_dx else (0,), dtype=(dy if x is None else x).dtype)
    if bias is None:
        return dx, dy.new_empty((0,))
    return dx, bias.new_empty(bias.shape if need_dbias else (0,))


def forward_flops(x: Any, bias: Any, residual: Any, seed: Any, dropout_p: float, activation: str, **_: Any) -> int:
    """Operations of the forward; shapes in the place of tensors."""
    each = flops.FLOPS_OF_ACTIVATION[activation][0]
    each += (bias is not None) + (residual is not None) + (dropout_p > 0.0)
    return each * torch.Size(x).numel()


def backward_flops(dy: Any, x: Any, bias: Any, seed: Any, dropout_p: float, activation: str, *_: Any, **__: Any) -> int:
    """Operations of the backward; shapes in the place of tensors."""
    each = 0 if x is None else flops.FLOPS_OF_ACTIVATION[activation][1] + 1
    each += (bias is not None) + (dropout_p > 0.0)
    return each * torch.Size(dy).numel()


flops.register_when_counted({"bias_act": forward_flops, "bias_act_backward": backward_flops})
registered.register_when_distributed(sharding.rules)
