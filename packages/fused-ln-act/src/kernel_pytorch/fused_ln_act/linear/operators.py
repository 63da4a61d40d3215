"""Triton: the product and what follows it in one kernel, `linear_act`, `gated_mlp`, and their gradients.

The operators of gradients end at the gradient of the pre-activation. What remains are products of matrices by PyTorch's
own operators (cuBLAS): torch.compile, checkpointing policies and DTensor know those. Saved for the backward, beside x
and the weights:

- linear_act: the result for relu, tanh and sigmoid, whose derivative follows from it; nothing for identity; else the
  pre-activation, `(..., N)`, or nothing where it is to be computed again.
- gated_mlp: nothing where gate and up are to be computed again, else both, `(..., 2I)`; h is made again in either case.

Rows are independent: DTensor may shard x over every dimension but the last with replicated weights, and nothing is
sent; each rank holds its own rows' part of the gradient of the bias. A linear layer may be sharded by the rows of its
weight too, with the bias: column parallelism, which shards y over its last dimension. A gated MLP may not, since the
rows of gate and up would part; nor may K be sharded, since the activation needs the whole sum. What comes in otherwise
is redistributed first, by DTensor, to what costs least.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.call_kinds import needs_grad
from kernel_pytorch.fused_ln_act._core.gradients import asks
from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act._core.sharding import Shardings, row_placements
from kernel_pytorch.fused_ln_act.rules.activations import FLOPS, activate, derivative

KERNELS = f"{__package__}.kernels"

# Their derivative follows from the result, which is there anyway, or is one.
FROM_RESULT = ("relu", "tanh", "sigmoid")
NOTHING_SAVED = (*FROM_RESULT, "identity")


def gradient_of_input(dz: Tensor, weight: Tensor) -> Tensor:
    """`dz @ weight`: of the input of `input @ weight.T`."""
    return dz @ weight


def gradient_of_weight(dz: Tensor, x: Tensor) -> Tensor:
    """`dz.T @ x` over all rows: of the weight of `x @ weight.T`."""
    return dz.reshape(-1, dz.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def sharding(placements: Any, a: Any) -> Shardings:
    """Where tensors of a linear layer may lie: by rows, or by columns of y, which are rows of the weight."""
    of_activated = ("y", "dy", "saved", "preactivation", "dz")
    for rows, share in row_placements(placements, a.x.ndim):
        yield _not_empty(a, {**dict.fromkeys(("x", *of_activated), rows), "dbias": share})
    columns, shard = placements.Shard(a.x.ndim - 1), placements.Shard
    yield _not_empty(
        a, {**dict.fromkeys(of_activated, columns), **dict.fromkeys(("weight", "bias", "dbias"), shard(0))}
    )


def sharding_gated(placements: Any, a: Any) -> Shardings:
    """Where tensors of a gated MLP may lie."""
    for rows, _ in row_placements(placements, a.x.ndim):
        yield _not_empty(a, dict.fromkeys(("x", "y", "preactivation", "dh", "saved", "h", "dz"), rows))


def _not_empty(a: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The placements without what comes back empty, which is the same everywhere."""
    if not getattr(a, "save_preactivation", True):
        del found["preactivation"]
    if a.activation == "identity" and hasattr(a, "need_dbias"):
        del found["dz"]
    return found


# A linear layer.


def fake_linear(a: Any) -> tuple[Tensor, Tensor]:
    """What it allocates; what is not saved is empty."""
    shape = (*a.x.shape[:-1], a.weight.shape[0])
    return a.x.new_empty(shape), a.x.new_empty(shape if a.save_preactivation else (0,))


def save_linear(y: Tensor, preactivation: Tensor, activation: str, save_preactivation: bool) -> tuple[Tensor | None]:
    """What the derivative is computed of."""
    if activation in FROM_RESULT:
        return (y,)
    return (preactivation if save_preactivation and activation != "identity" else None,)


@asks("dy saved x weight bias activation needs")
def gradient_linear(*given: Any) -> tuple[Tensor | None, ...]:
    """Gradients of x, weight and bias, each only if it is needed."""
    dy, saved, x, weight, bias, activation, needs = given
    need_dx, need_dweight, need_dbias = needs
    dz, dbias = dy, None
    if need_dbias or activation != "identity":
        need_dz = need_dx or need_dweight
        dz, dbias = linear_act_backward(dy, *saved, x, weight, bias, activation, need_dz, need_dbias)
    dz = dy if activation == "identity" else dz
    return (
        gradient_of_input(dz, weight) if need_dx else None,
        gradient_of_weight(dz, x) if need_dweight else None,
        dbias,
    )


def flops_linear(x: Any, weight: Any, bias: Any, activation: str, *_: Any, **__: Any) -> int:
    """A product and what follows it; shapes in the place of tensors, here and below."""
    rows, (columns, depth) = torch.Size(x[:-1]).numel(), weight
    each = FLOPS[activation][0] + (bias is not None)
    return rows * columns * (2 * depth + each)


linear_act = declare(
    "linear_act(Tensor x, Tensor weight, Tensor? bias, str activation, bool save_preactivation)"
    " -> (Tensor y, Tensor preactivation)",
    launch=f"{KERNELS}.forward:linear_act",
    fake=fake_linear,
    save=save_linear,
    gradient=gradient_linear,
    flops=flops_linear,
    sharding=sharding,
)


# Its gradient at the pre-activation.


def fake_linear_backward(a: Any) -> tuple[Tensor, Tensor]:
    """What it allocates; what is not needed is empty, and so is dz of "identity", which is dy."""
    dz = a.dy.new_empty(a.dy.shape if a.need_dz and a.activation != "identity" else (0,))
    return dz, a.dy.new_empty((0,)) if a.bias is None else a.bias.new_empty((a.weight.shape[0] if a.need_dbias else 0,))


def formula_linear(a: Any) -> tuple[Tensor, Tensor]:
    """The gradients of `kernels/backward.py` in PyTorch that autograd can follow."""
    wide = torch.promote_types(a.x.dtype, torch.float32)
    z = a.x.to(wide) @ a.weight.to(wide).t()
    z = z if a.bias is None else z + a.bias.to(wide)
    dz = a.dy.to(wide) * derivative(z, a.activation)
    found = dz.to(a.dy.dtype) if a.need_dz and a.activation != "identity" else a.dy.new_empty(0)
    if a.bias is None or not a.need_dbias:
        return found, (a.dy if a.bias is None else a.bias).new_empty(0)
    return found, dz.sum_to_size(a.bias.shape).to(a.bias.dtype)


def flops_linear_backward(a: Any) -> int:
    """The derivative, and the product once more where nothing was saved; the other products count themselves."""
    depth = 0 if a.saved is not None or a.activation == "identity" else a.weight[1]
    return torch.Size(a.dy).numel() * (2 * depth + FLOPS[a.activation][1] + 1 + (a.bias is not None))


linear_act_backward = declare(
    "linear_act_backward(Tensor dy, Tensor? saved, Tensor x, Tensor weight, Tensor? bias, str activation,"
    " bool need_dz, bool need_dbias) -> (Tensor dz, Tensor dbias)",
    launch=f"{KERNELS}.backward:linear_act_backward",
    fake=fake_linear_backward,
    formula=formula_linear,
    flops=flops_linear_backward,
    sharding=sharding,
)


# A gated MLP.


def fake_gated(a: Any) -> tuple[Tensor, Tensor]:
    """What it allocates; what is not saved is empty."""
    saved = (*a.x.shape[:-1], a.w_gate_up.shape[0]) if a.save_preactivation else (0,)
    return a.x.new_empty((*a.x.shape[:-1], a.w_down.shape[0])), a.x.new_empty(saved)


def save_gated(preactivation: Tensor, save_preactivation: bool) -> tuple[Tensor | None]:
    """Gate and up, where they are not to be computed again."""
    return (preactivation if save_preactivation else None,)


@asks("dy saved x w_gate_up w_down activation needs")
def gradient_gated(*given: Any) -> tuple[Tensor | None, ...]:
    """Gradients of x and both weights, each only if it is needed."""
    dy, saved, x, w_gate_up, w_down, activation, needs = given
    need_dx, need_first, need_second = needs
    dh = gradient_of_input(dy, w_down)
    h, dz = gated_mlp_backward(dh, *saved, x, w_gate_up, activation, need_second, need_dx or need_first)
    return (
        gradient_of_input(dz, w_gate_up) if need_dx else None,
        gradient_of_weight(dz, x) if need_first else None,
        gradient_of_weight(dy, h) if need_second else None,
    )


def flops_gated(x: Any, w_gate_up: Any, w_down: Any, activation: str, *_: Any, **__: Any) -> int:
    """Operations of the two products and of the gated activation between them."""
    rows, (outputs, hidden), (packed, depth) = torch.Size(x[:-1]).numel(), w_down, w_gate_up
    between = hidden * (FLOPS[activation][0] + 1)
    return rows * (2 * depth * packed + between + 2 * hidden * outputs)


gated_mlp = declare(
    "gated_mlp(Tensor x, Tensor w_gate_up, Tensor w_down, str activation, bool save_preactivation)"
    " -> (Tensor y, Tensor preactivation)",
    launch=f"{KERNELS}.forward:gated_mlp",
    fake=fake_gated,
    save=save_gated,
    gradient=gradient_gated,
    flops=flops_gated,
    sharding=sharding_gated,
)


# Its gradient at the pre-activation, and h once more.


def fake_gated_backward(a: Any) -> tuple[Tensor, Tensor]:
    """What it allocates; what is not needed is empty."""
    dz = (*a.dh.shape[:-1], a.w_gate_up.shape[0]) if a.need_dz else (0,)
    return a.dh.new_empty(a.dh.shape if a.need_h else (0,)), a.dh.new_empty(dz)


def formula_gated(a: Any) -> tuple[Tensor, Tensor]:
    """The gradients of `kernels/backward.py` in PyTorch that autograd can follow."""
    wide = torch.promote_types(a.x.dtype, torch.float32)
    gate, up = (a.x.to(wide) @ a.w_gate_up.to(wide).t()).chunk(2, -1)
    activated, incoming = activate(gate, a.activation), a.dh.to(wide)
    dz = torch.cat([incoming * up * derivative(gate, a.activation), incoming * activated], -1)
    return (
        (activated * up).to(a.dh.dtype) if a.need_h else a.dh.new_empty(0),
        dz.to(a.dh.dtype) if a.need_dz else a.dh.new_empty(0),
    )


def flops_gated_backward(dh: Any, saved: Any, x: Any, w_gate_up: Any, activation: str, *_: Any, **__: Any) -> int:
    """Both derivatives and h, and the first product once more where nothing was saved."""
    depth = 0 if saved is not None else w_gate_up[1]
    return torch.Size(dh).numel() * (4 * depth + sum(FLOPS[activation]) + 4)


gated_mlp_backward = declare(
    "gated_mlp_backward(Tensor dh, Tensor? saved, Tensor x, Tensor w_gate_up, str activation, bool need_h,"
    " bool need_dz) -> (Tensor h, Tensor dz)",
    launch=f"{KERNELS}.backward:gated_mlp_backward",
    fake=fake_gated_backward,
    formula=formula_gated,
    flops=flops_gated_backward,
    sharding=sharding_gated,
)

# Levels "triton" of both functions.


def _linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool) -> tuple[Any, ...]:
    # Without a backward nothing is written for it.
    save = save and activation not in NOTHING_SAVED and needs_grad(x, weight, bias)
    return x, weight.to(x.dtype), bias, activation, save


def _gated_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str, recompute: bool) -> tuple[Any, ...]:
    save = not recompute and needs_grad(x, w_gate_up, w_down)
    return x, w_gate_up.to(x.dtype), w_down.to(x.dtype), activation, save


MAPPED = {"linear_act": (linear_act, _linear_act), "gated_mlp": (gated_mlp, _gated_mlp)}
"""By function: its operator, and what converts the function's arguments to the operator's."""
