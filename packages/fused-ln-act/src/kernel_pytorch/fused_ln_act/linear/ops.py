"""The operators `torch.ops.kernel_pytorch.{linear_act, linear_act_backward, gated_mlp, gated_mlp_backward}`.

The backward operators end at the gradient of the pre-activation. What remains are products of matrices, which autograd
makes by PyTorch's own operators: torch.compile, checkpointing policies and DTensor know those.
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
    "linear_act(Tensor x, Tensor weight, Tensor? bias, str activation, bool save_preactivation)"
    " -> (Tensor y, Tensor preactivation)"
)
library.define(
    "linear_act_backward(Tensor dy, Tensor? saved, Tensor x, Tensor weight, Tensor? bias, str activation,"
    " bool need_dz, bool need_dbias) -> (Tensor dz, Tensor dbias)"
)
library.define(
    "gated_mlp(Tensor x, Tensor w_gate_up, Tensor w_down, str activation, bool save_preactivation)"
    " -> (Tensor y, Tensor preactivation)"
)
library.define(
    "gated_mlp_backward(Tensor dh, Tensor? saved, Tensor x, Tensor w_gate_up, str activation, bool need_h,"
    " bool need_dz) -> (Tensor h, Tensor dz)"
)

# Their derivative follows from the result, which is there anyway, or is one.
FROM_RESULT = ("relu", "tanh", "sigmoid")
NOTHING_SAVED = (*FROM_RESULT, "identity")


def _check(x: Tensor, activation: str, matrices: dict[str, tuple[Tensor, int]]) -> None:
    """Whoever calls an operator directly passes no other check, and a wrong shape would read foreign memory.

    Args:
        x: the principal argument.
        activation: as given.
        matrices: by name, a weight and how many columns it must have.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: given {activation!r}; allowed are {', '.join(map(repr, ACTIVATIONS))}")
    check_floats(x=x)
    for name, (matrix, columns) in matrices.items():
        check_memory(name, matrix)
        if matrix.dtype != x.dtype:
            raise TypeError(f"{name}: dtype is {matrix.dtype}; it must be that of x, {x.dtype}")
        if matrix.dim() != 2 or matrix.shape[1] != columns:
            raise ValueError(f"{name}: shape is {tuple(matrix.shape)}; it must have two dimensions, the last {columns}")


def _check_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    check_floats(**{name: tensor})
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: shape is {tuple(tensor.shape)}; it must be {shape}")


def launch_linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_preactivation: bool
) -> tuple[Tensor, Tensor]:
    """`(y, preactivation)` from one Triton kernel; what is not to be saved is empty."""
    from . import triton_forward

    _check(x, activation, {"weight": (weight, x.shape[-1])})
    _check_shape("bias", bias, (weight.shape[0],))
    return triton_forward.linear(x, weight, bias, activation, save_preactivation)


def launch_linear_act_backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    need_dz: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor]:
    """`(dz, dbias)` from the Triton kernels; what is not needed is empty, and so is dz of "identity", which is dy."""
    from . import triton_backward

    _check(x, activation, {"weight": (weight, x.shape[-1])})
    shape = (*x.shape[:-1], weight.shape[0])
    _check_shape("dy", dy, shape)
    _check_shape("saved", saved, shape)
    _check_shape("bias", bias, (weight.shape[0],))
    need_dz = need_dz and activation != "identity"
    return triton_backward.linear_backward(
        dy, saved, x, weight, bias, activation, need_dz, need_dbias and bias is not None
    )


def launch_gated_mlp(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str, save_preactivation: bool
) -> tuple[Tensor, Tensor]:
    """`(y, preactivation)` from two Triton kernels; what is not to be saved is empty."""
    from . import triton_forward

    _check(x, activation, {"w_gate_up": (w_gate_up, x.shape[-1]), "w_down": (w_down, w_gate_up.shape[0] // 2)})
    if w_gate_up.shape[0] % 2:
        raise ValueError(f"w_gate_up: shape is {tuple(w_gate_up.shape)}; its first dimension must be even")
    h, preactivation = triton_forward.gated_linear(x, w_gate_up, activation, save_preactivation)
    return triton_forward.linear(h, w_down, None, "identity", False)[0], preactivation


def launch_gated_mlp_backward(
    dh: Tensor, saved: Tensor | None, x: Tensor, w_gate_up: Tensor, activation: str, need_h: bool, need_dz: bool
) -> tuple[Tensor, Tensor]:
    """`(h, dz)` from one Triton kernel; what is not needed is empty."""
    from . import triton_backward

    _check(x, activation, {"w_gate_up": (w_gate_up, x.shape[-1])})
    _check_shape("dh", dh, (*x.shape[:-1], w_gate_up.shape[0] // 2))
    _check_shape("saved", saved, (*x.shape[:-1], w_gate_up.shape[0]))
    return triton_backward.gated_linear_backward(dh, saved, x, w_gate_up, activation, need_h, need_dz)


implement("linear_act", launch_linear_act)
implement("linear_act_backward", launch_linear_act_backward)
implement("gated_mlp", launch_gated_mlp)
implement("gated_mlp_backward", launch_gated_mlp_backward)


# Fakes: exactly what the launchers allocate, contiguous whatever the strides of the inputs.


@torch.library.register_fake("kernel_pytorch::linear_act", lib=library)
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_preactivation: bool
) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape if save_preactivation else (0,))


@torch.library.register_fake("kernel_pytorch::linear_act_backward", lib=library)
def _(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    need_dz: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor]:
    dz = dy.new_empty(dy.shape if need_dz and activation != "identity" else (0,))
    if bias is None:
        return dz, dy.new_empty((0,))
    return dz, bias.new_empty((weight.shape[0] if need_dbias else 0,))


@torch.library.register_fake("kernel_pytorch::gated_mlp", lib=library)
def _(x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str, save_preactivation: bool) -> tuple[Tensor, Tensor]:
    saved = (*x.shape[:-1], w_gate_up.shape[0]) if save_preactivation else (0,)
    return x.new_empty((*x.shape[:-1], w_down.shape[0])), x.new_empty(saved)


@torch.library.register_fake("kernel_pytorch::gated_mlp_backward", lib=library)
def _(
    dh: Tensor, saved: Tensor | None, x: Tensor, w_gate_up: Tensor, activation: str, need_h: bool, need_dz: bool
) -> tuple[Tensor, Tensor]:
    dz = (*dh.shape[:-1], w_gate_up.shape[0]) if need_dz else (0,)
    return dh.new_empty(dh.shape if need_h else (0,)), dh.new_empty(dz)


# Operations; shapes in the place of tensors.


def linear_act_flops(x: Any, weight: Any, bias: Any, activation: str, *_: Any, **__: Any) -> int:
    """A product and what follows it."""
    rows, (columns, depth) = torch.Size(x[:-1]).numel(), weight
    each = flops.FLOPS_OF_ACTIVATION[activation][0] + (bias is not None)
    return rows * columns * (2 * depth + each)


def linear_act_backward_flops(
    dy: Any, saved: Any, x: Any, weight: Any, bias: Any, activation: str, *_: Any, **__: Any
) -> int:
    """The derivative, and the product once more where nothing was saved; the other products count themselves."""
    depth = 0 if saved is not None or activation == "identity" else weight[1]
    return torch.Size(dy).numel() * (2 * depth + flops.FLOPS_OF_ACTIVATION[activation][1] + 1 + (bias is not None))


def gated_mlp_flops(x: Any, w_gate_up: Any, w_down: Any, activation: str, *_: Any, **__: Any) -> int:
    """Two products and what stands between them."""
    rows, (outputs, hidden), (packed, depth) = torch.Size(x[:-1]).numel(), w_down, w_gate_up
    between = hidden * (flops.FLOPS_OF_ACTIVATION[activation][0] + 1)
    return rows * (2 * depth * packed + between + 2 * hidden * outputs)


def gated_mlp_backward_flops(dh: Any, saved: Any, x: Any, w_gate_up: Any, activation: str, *_: Any, **__: Any) -> int:
    """Both derivatives and h, and the first product once more where nothing was saved."""
    depth = 0 if saved is not None else w_gate_up[1]
    return torch.Size(dh).numel() * (4 * depth + sum(flops.FLOPS_OF_ACTIVATION[activation]) + 4)


flops.register_when_counted(
    {
        "linear_act": linear_act_flops,
        "linear_act_backward": linear_act_backward_flops,
        "gated_mlp": gated_mlp_flops,
        "gated_mlp_backward": gated_mlp_backward_flops,
    }
)
registered.register_when_distributed(sharding.rules)
