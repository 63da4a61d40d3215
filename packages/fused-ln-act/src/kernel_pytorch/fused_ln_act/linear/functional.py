"""The public functions of linear layers: arguments by keyword, checked before any kernel starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.arguments import check_flag, check_tensor, shape_of
from kernel_pytorch.fused_ln_act._core.operation import Operation, Prepared, first
from kernel_pytorch.fused_ln_act.arguments import check_activation
from kernel_pytorch.fused_ln_act.levels import LADDER


def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    save_preactivation: bool = True,
    level: str | None = None,
) -> Tensor:
    """A linear layer and an activation, `y = activation(x @ weight.T + bias)`, in float32 and rounded once.

    Differentiable in x, weight and bias, any number of times except at level "compile" (once). Under autocast x, weight
    and bias are cast as `torch.nn.functional.linear` casts them.

    Args:
        x: `(..., K)`, float16, bfloat16, float32 or float64, any strides, K at least 1.
        weight: `(N, K)` in the dtype of x, as `torch.nn.Linear` has it, N at least 1.
        bias: `(N,)` in the dtype of x; None for none.
        activation: "gelu", "gelu_tanh", "silu", "relu", "relu_squared", "quick_gelu", "tanh", "sigmoid" or "identity".
        save_preactivation: whether level "triton" keeps `x @ weight.T + bias` for the backward, `(..., N)`, as eager
            PyTorch does; otherwise the backward computes it again, half as many operations more. What needs no
            pre-activation ("relu", "tanh", "sigmoid", "identity") saves none, and without gradients none is written.
        level: None for the default of this device, "native" for "identity" and for rows that are no multiples of
            16 bytes; or "reference", "native", "torchscript", "compile", "triton".

    Returns:
        `(..., N)` in the dtype of x.

    Raises:
        TypeError: a tensor is none, or has no allowed dtype.
        ValueError: shapes, devices, activation or level do not fit; the message names the argument.
        RuntimeError: the level asked for cannot run on this device or dtype; the message says why.

    At level "triton" the product, the bias and the activation are one kernel; float32 is multiplied in full precision
    unless `torch.backends.cuda.matmul.fp32_precision` is "tf32". In the backward the gradient of the pre-activation and
    of the bias are Triton kernels, the products for those of x and weight are PyTorch's own.

    Source: the activations are named in `activations.py`.
    """
    return LINEAR_ACT(x, weight, bias, activation, save_preactivation, level)


def gated_mlp(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    activation: str = "silu",
    *,
    recompute: bool = False,
    level: str | None = None,
) -> Tensor:
    """The gated feed-forward of a transformer: `h = activation(x @ w_gate.T) * (x @ w_up.T)`, `y = h @ w_down.T`.

    Everything in float32, h and y rounded to the dtype of x. Differentiable in x and both weights, any number of times
    except at level "compile" (once). Autocast as in `linear_act`.

    `level` is as in `linear_act`; `TypeError`, `ValueError` and `RuntimeError` are raised as by `linear_act`.

    Args:
        x: `(..., K)`, float16, bfloat16, float32 or float64, any strides, K at least 1.
        w_gate_up: `(2I, K)` in the dtype of x: the I rows of the gate, then the I rows of up.
        w_down: `(N, I)` in the dtype of x.
        activation: as in `linear_act`; "silu" makes it SwiGLU, "gelu" GEGLU, "relu" ReGLU.
        recompute: whether the backward of level "triton" computes gate and up again, in the kernel that needs them, and
            nothing but x and the weights is saved: eight products instead of six. Otherwise gate and up are saved,
            `(..., 2I)`; eager PyTorch saves `(..., 4I)`.

    Returns:
        `(..., N)` in the dtype of x.

    At level "triton" the forward is two kernels: gate, up and their product in one, which reads x once for both, and
    the second product. Precision and backward as in `linear_act`.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202.
    """
    return GATED_MLP(x, w_gate_up, w_down, activation, recompute, level)


def _linear_act(
    level: str | None, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_preactivation: bool
) -> Prepared:
    check_tensor("x", x)
    check_activation(activation)
    check_flag("save_preactivation", save_preactivation)
    _check_matrix("weight", weight, x.shape[-1], f"that of x, {shape_of(x)}")
    if bias is not None:
        check_tensor("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(
                f"bias: shape is {shape_of(bias)}; for weight {shape_of(weight)} it must be {tuple(weight.shape[:1])}"
            )
    x, weight, *rest = _as_autocast(x, weight, bias)
    bias = rest[0]
    _check_alike(x, {"weight": weight, "bias": bias})
    if level is None and activation == "identity":
        level = "native"  # nothing follows the product
    level = _without_odd_rows("linear_act", level, x, weight, weight.shape[0])
    return _of_rows(level, x, weight, bias, activation, save_preactivation)


def _gated_mlp(
    level: str | None, x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str, recompute: bool
) -> Prepared:
    check_tensor("x", x)
    check_activation(activation)
    check_flag("recompute", recompute)
    _check_matrix("w_gate_up", w_gate_up, x.shape[-1], f"that of x, {shape_of(x)}")
    if w_gate_up.shape[0] % 2:
        raise ValueError(f"w_gate_up: shape is {shape_of(w_gate_up)}; its first dimension must be even")
    _check_matrix("w_down", w_down, w_gate_up.shape[0] // 2, f"half the rows of w_gate_up, {shape_of(w_gate_up)}")
    x, w_gate_up, w_down = _as_autocast(x, w_gate_up, w_down)  # type: ignore[assignment]
    _check_alike(x, {"w_gate_up": w_gate_up, "w_down": w_down})
    level = _without_odd_rows("gated_mlp", level, x, w_gate_up, w_down.shape[0])
    level = _without_odd_rows("gated_mlp", level, x, w_down, w_down.shape[1])
    return _of_rows(level, x, w_gate_up, w_down, activation, recompute)


def _of_rows(level: str | None, x: Tensor, *others: Any) -> Prepared:
    """The call of a level's function; the kernels want rows."""
    if x.dim() == 1:
        return Prepared(level, (x[None], *others), result=first, state=_autocast_dtypes)
    return Prepared(level, (x, *others), state=_autocast_dtypes)


def _autocast_dtypes() -> tuple[torch.dtype, torch.dtype]:
    """What autocast casts to, which no tensor shows."""
    return torch.get_autocast_dtype("cuda"), torch.get_autocast_dtype("cpu")


def _check_matrix(name: str, matrix: Tensor, columns: int, why: str) -> None:
    check_tensor(name, matrix)
    if matrix.dim() != 2 or matrix.shape[1] != columns:
        raise ValueError(f"{name}: shape is {shape_of(matrix)}; it must have two dimensions, the last {columns}: {why}")
    if matrix.shape[0] == 0:
        raise ValueError(f"{name}: shape is {shape_of(matrix)}; it must have at least one row")


def _check_alike(x: Tensor, others: dict[str, Tensor | None]) -> None:
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name}: dtype is {tensor.dtype}; it must be that of x, {x.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"{name}: device is {tensor.device}; it must be that of x, {x.device}")


def _without_odd_rows(function: str, level: str | None, x: Tensor, weight: Tensor, columns: int) -> str | None:
    """The level, or "native" where the default would be "triton" and the copy engine cannot move rows of 16 bits.

    These are rows of x, weight or a result of `columns` columns; cuBLAS reads them faster than the kernels by pointer.
    """
    if level is not None or not LADDER.is_default(function, "triton", x):
        return level
    matrices = [weight] if x.dim() == 1 else [x, weight]
    moves = all(m.stride(-1) == 1 and m.stride(-2) % 8 == 0 for m in matrices)
    if not torch.compiler.is_compiling():  # Dynamo of torch 2.11 cannot trace the offset, and a graph has no fixed one
        moves = moves and all(m.storage_offset() * m.itemsize % 16 == 0 for m in matrices)
    return None if moves and columns % 8 == 0 else "native"


def _as_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """What autocast makes of the operands of a product: float64 stays as it is."""
    x = tensors[0]
    assert x is not None
    device = x.device.type
    # is_autocast_enabled is invalid for devices without autocast ("meta"). Dynamo cannot trace is_autocast_available.
    has_autocast = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    if x.dtype == torch.float64 or not has_autocast or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(None if t is None else t.to(dtype) for t in tensors)


LINEAR_ACT = Operation(LADDER, "linear_act", prepare=_linear_act)
GATED_MLP = Operation(LADDER, "gated_mlp", prepare=_gated_mlp)
