"""The operators `torch.ops.kernel_pytorch.{norm_act, norm_act_backward}`.

One pair serves all functions of this group: which norm, which activation, and what is there is said by arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act import flops
from kernel_pytorch.fused_ln_act import sharding as registered
from kernel_pytorch.fused_ln_act.activations import ACTIVATIONS
from kernel_pytorch.fused_ln_act.direct_calls import check_count, check_floats, check_memory
from kernel_pytorch.fused_ln_act.dispatch import implement, library

from . import sharding

library.define(
    "norm_act(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? seed, float eps, float dropout_p,"
    " str norm, str activation) -> (Tensor y, Tensor h, Tensor statistics)"
)
library.define(
    "norm_act_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor? bias, Tensor? seed, Tensor statistics,"
    " float eps, float dropout_p, str norm, str activation, bool has_residual, bool need_dx, bool need_dresidual,"
    " bool need_dweight, bool need_dbias) -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)"
)


def _check(
    x: Tensor, like_x: dict[str, Tensor | None], parameters: dict[str, Tensor | None], seed: Tensor | None,
    dropout_p: float, norm: str, activation: str,
) -> None:  # fmt: skip
    """Whoever calls an operator directly passes no other check, and a wrong shape would read foreign memory."""
    if norm not in ("layer", "rms"):
        raise ValueError(f"norm: given {norm!r}; allowed are 'layer', 'rms'")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: given {activation!r}; allowed are {', '.join(map(repr, ACTIVATIONS))}")
    check_floats(x=x, **like_x, **parameters)
    for name, tensor in like_x.items():
        if tensor is not None and tensor.shape != x.shape:
            raise ValueError(f"{name}: shape is {tuple(tensor.shape)}; it must be that of x, {tuple(x.shape)}")
    for name, tensor in parameters.items():
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise ValueError(f"{name}: shape is {tuple(tensor.shape)}; for x of {tuple(x.shape)} it must be its end")
    if dropout_p != 0.0 and (seed is None or seed.dtype != torch.int64 or seed.dim() != 0):
        raise ValueError(f"seed: given {seed}; with dropout_p {dropout_p} it must be an int64 tensor of shape ()")
    if seed is not None:
        check_memory("seed", seed)


def launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`(y, h, statistics)` from the Triton kernel; without a residual h is empty, since it would be x."""
    from . import triton_forward

    _check(x, {"residual": residual}, {"weight": weight, "bias": bias}, seed, dropout_p, norm, activation)
    return triton_forward.forward(x, residual, weight, bias, seed, eps, dropout_p, norm, activation)


def launch_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    statistics: Tensor,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
    has_residual: bool,
    need_dx: bool,
    need_dresidual: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(dx, dresidual, dweight, dbias)` from the kernels; what is not needed is empty. `eps` is in the statistics."""
    from . import triton_backward

    _check(h, {"dy": dy, "dh": dh}, {"weight": weight, "bias": bias}, seed, dropout_p, norm, activation)
    check_floats(statistics=statistics)
    check_count(h.shape[:-1].numel() * (2 if norm == "layer" else 1), statistics=statistics)
    return triton_backward.backward(
        dy, dh, h, weight, bias, seed, statistics, dropout_p, norm, activation, has_residual,
        need_dx, need_dresidual, need_dweight and weight is not None, need_dbias and bias is not None,
    )  # fmt: skip


implement("norm_act", launch_forward)
implement("norm_act_backward", launch_backward)


# Fakes: exactly what the launchers allocate, contiguous whatever the strides of the inputs.


@torch.library.register_fake("kernel_pytorch::norm_act", lib=library)
def _(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    shape = (2 if norm == "layer" else 1, *x.shape[:-1])
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty((0,) if residual is None else x.shape, dtype=dtype),
        x.new_empty(shape, dtype=torch.promote_types(dtype, torch.float32)),
    )


@torch.library.register_fake("kernel_pytorch::norm_act_backward", lib=library)
def _(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    statistics: Tensor,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
    has_residual: bool,
    need_dx: bool,
    need_dresidual: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nothing: tuple[int, ...] = (0,)
    return (
        h.new_empty(h.shape if need_dx else nothing),
        h.new_empty(h.shape if need_dresidual else nothing),
        h.new_empty(nothing) if weight is None else weight.new_empty(weight.shape if need_dweight else nothing),
        h.new_empty(nothing) if bias is None else bias.new_empty(bias.shape if need_dbias else nothing),
    )


# Of the norm, forward and backward: what "layer" and "rms" do to an element, without the activation.
FLOPS = {"layer": (7, 13), "rms": (4, 10)}


def forward_flops(x, residual, weight, bias, seed, eps, dropout_p, norm, activation, **_) -> int:  # type: ignore[no-untyped-def]
    """Operations of the forward; shapes in the place of tensors."""
    each = FLOPS[norm][0] + flops.FLOPS_OF_ACTIVATION[activation][0]
    each += (residual is not None) + (bias is not None) + (dropout_p > 0.0)
    return each * torch.Size(x).numel()


def backward_flops(dy, dh, h, weight, bias, seed, statistics, eps, dropout_p, norm, activation, *_, **__) -> int:  # type: ignore[no-untyped-def]
    """Operations of the backward; shapes in the place of tensors."""
    each = FLOPS[norm][1] + flops.FLOPS_OF_ACTIVATION[activation][1]
    each += (dh is not None) + (bias is not None) + (dropout_p > 0.0)
    return each * torch.Size(h).numel()


flops.register_when_counted({"norm_act": forward_flops, "norm_act_backward": backward_flops})
registered.register_when_distributed(sharding.rules)
