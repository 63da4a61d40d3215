"""The operators of the Triton level: `norm_act` and its gradient.

One pair serves all functions of this group: which norm, which activation, and what is there is said by arguments.
Saved for the backward: what was normalised (x, or h, which is a result already), the parameters, the seed, and mean and
rstd, two float32 a row (one for the RMS norm). The input of the activation and the mask of dropout are made again.

Rows are independent, so DTensor may shard x over every dimension but the last, the parameters are replicated, and
nothing is sent: y, h and the statistics are sharded like x, and each rank holds its own rows' part of the parameters'
gradients. With dropout the mask goes by the place of an element in the whole tensor, which a rank that holds a part
does not know: then everything is replicated. Anything else that comes in (a sharded last dimension, a pending sum) is
redistributed first, by DTensor, to what costs least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act.activations import FLOPS, derivative
from kernel_pytorch.fused_ln_act.philox import dropout

Placed = Iterator[tuple[list[Any], list[Any]]]

# Operations of the norm, forward and backward: what "layer" and "rms" do to an element, without the activation.
FLOPS_OF_NORM = {"layer": (7, 13), "rms": (4, 10)}


def launch() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import forward

    return forward.norm_act


def fake(
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
    """What it allocates; without a residual h is empty, since it would be x."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty((0,) if residual is None else x.shape, dtype=dtype),
        x.new_empty((2 if norm == "layer" else 1, *x.shape[:-1]), dtype=torch.promote_types(dtype, torch.float32)),
    )


def save(x: Tensor, residual: Tensor | None, h: Tensor) -> tuple[Tensor]:
    """What was normalised."""
    return (x if residual is None else h,)


def gradient(
    dy: Tensor | None,
    dh: Tensor | None,
    saved: tuple[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    statistics: Tensor,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
    needs: Sequence[bool],
    dtypes: Sequence[torch.dtype | None],
) -> tuple[Tensor | None, ...]:
    """Of x, the residual, weight and bias."""
    need_x, need_residual, need_dweight, need_dbias, _ = needs
    if dy is None:
        # Only the sum was used.
        assert dh is not None
        if dropout_p == 0.0:
            return dh, dh, None, None, None
        dy, need_dweight, need_dbias = torch.zeros_like(dh), False, False
    # Without dropout the gradients of x and of the residual are the same.
    has_residual = dtypes[1] is not None
    one = dropout_p == 0.0 or not has_residual
    dx, dresidual, dweight, dbias = norm_act_backward(
        dy, dh, *saved, weight, bias, seed, statistics, eps, dropout_p, norm, activation, has_residual,
        need_x or (one and need_residual), need_residual and not one, need_dweight, need_dbias,
    )  # fmt: skip
    return dx, dx if one else dresidual, dweight if need_dweight else None, dbias if need_dbias else None, None


def flops(
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    seed: Any,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
    **_: Any,
) -> int:
    """Operations of the forward; shapes in the place of tensors."""
    each = FLOPS_OF_NORM[norm][0] + FLOPS[activation][0]
    each += (residual is not None) + (bias is not None) + (dropout_p > 0.0)
    return each * torch.Size(x).numel()


def placements(
    dtensor: Any,
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any,
    seed: Any,
    eps: float,
    dropout_p: float,
    *names: str,
) -> Placed:
    """Where y, h, the statistics and what goes in may lie."""
    whole = dtensor.Replicate()
    for rows, statistics, _ in placed_together(dtensor, x, dropout_p):
        inputs = (x, rows), (residual, rows), (weight, whole), (bias, whole), (seed, whole)
        outputs = [rows, whole if residual is None else rows, statistics]
        yield outputs, [None if tensor is None else place for tensor, place in inputs]


norm_act = declare(
    "norm_act(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? seed, float eps, float dropout_p,"
    " str norm, str activation) -> (Tensor y, Tensor h, Tensor statistics)",
    launch=launch,
    fake=fake,
    save=save,
    gradient=gradient,
    follows={"h": ("x", "residual")},
    flops=flops,
    sharding=placements,
)


# The gradient.


def launch_backward() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import backward

    return backward.norm_act_backward


def fake_backward(
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
    """What it allocates; what is not needed comes back empty."""
    nothing: tuple[int, ...] = (0,)
    return (
        h.new_empty(h.shape if need_dx else nothing),
        h.new_empty(h.shape if need_dresidual else nothing),
        h.new_empty(nothing) if weight is None else weight.new_empty(weight.shape if need_dweight else nothing),
        h.new_empty(nothing) if bias is None else bias.new_empty(bias.shape if need_dbias else nothing),
    )


def formula(
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
    *needs: bool,
) -> tuple[Tensor, ...]:
    """The gradients of `kernels/backward.py` in PyTorch that autograd can follow; statistics are made again."""
    wide = torch.promote_types(h.dtype, torch.float32)
    x_hat, dz = h.to(wide), dy.to(wide)
    if norm == "layer":
        x_hat = x_hat - x_hat.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x_hat.square().mean(-1, keepdim=True) + eps)
    x_hat = x_hat * rstd
    z = x_hat if weight is None else x_hat * weight.to(wide)
    z = z if bias is None else z + bias.to(wide)
    if dropout_p > 0.0 and seed is not None and not has_residual:
        dz = dropout(dz, seed, dropout_p)
    dz = dz * derivative(z, activation)
    g = dz if weight is None else dz * weight.to(wide)
    dx = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
    if norm == "layer":
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * rstd
    if dh is not None:
        dx = dx + dh.to(wide)
    dresidual = dx.clone() if needs[1] else dx  # an output of its own
    if dropout_p > 0.0 and seed is not None and has_residual:
        dx = dropout(dx, seed, dropout_p)
    dweight = None if weight is None else (dz * x_hat).sum_to_size(weight.shape).to(weight.dtype)
    dbias = None if bias is None else dz.sum_to_size(bias.shape).to(bias.dtype)
    found = dx.to(h.dtype), dresidual.to(h.dtype), dweight, dbias
    # Outputs of an operator are tensors: what is not there is empty.
    return tuple(h.new_empty(0) if t is None or not need else t for t, need in zip(found, needs, strict=True))


def flops_backward(
    dy: Any,
    dh: Any,
    h: Any,
    weight: Any,
    bias: Any,
    seed: Any,
    statistics: Any,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
    *_: Any,
    **__: Any,
) -> int:
    """Operations of the backward; shapes in the place of tensors."""
    each = FLOPS_OF_NORM[norm][1] + FLOPS[activation][1]
    each += (dh is not None) + (bias is not None) + (dropout_p > 0.0)
    return each * torch.Size(h).numel()


def placements_backward(
    dtensor: Any,
    dy: Any,
    dh: Any,
    h: Any,
    weight: Any,
    bias: Any,
    seed: Any,
    statistics: Any,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
    has_residual: bool,
    need_dx: bool,
    need_dresidual: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> Placed:
    """Where the gradients and what goes in may lie."""
    whole = dtensor.Replicate()
    needs = need_dx, need_dresidual, need_dweight and weight is not None, need_dbias and bias is not None
    for rows, of_rows, share in placed_together(dtensor, h, dropout_p):
        # What is not needed comes back empty, and is the same everywhere.
        outputs = [place if need else whole for place, need in zip((rows, rows, share, share), needs, strict=True)]
        parameters = (weight, whole), (bias, whole), (seed, whole)
        inputs = (dy, rows), (dh, rows), (h, rows), *parameters, (statistics, of_rows)
        yield outputs, [None if tensor is None else place for tensor, place in inputs]


norm_act_backward = declare(
    "norm_act_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor? bias, Tensor? seed, Tensor statistics,"
    " float eps, float dropout_p, str norm, str activation, bool has_residual, bool need_dx, bool need_dresidual,"
    " bool need_dweight, bool need_dbias) -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    launch=launch_backward,
    fake=fake_backward,
    formula=formula,
    flops=flops_backward,
    sharding=placements_backward,
)


def placed_together(dtensor: Any, x: Any, dropout_p: float) -> Iterator[tuple[Any, Any, Any]]:
    """Placements of x, the statistics and the parameters' gradients that belong together."""
    yield (dtensor.Replicate(),) * 3
    if dropout_p == 0.0:
        for dimension in range(x.ndim - 1):
            # The statistics have a dimension more, in front: mean and rstd.
            yield dtensor.Shard(dimension), dtensor.Shard(dimension + 1), dtensor.Partial()
