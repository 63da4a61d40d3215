"""The forward pass in Triton: one kernel, packed or not, without a copy. The kernel, then the launcher.

Gate and up are seen as `(T, I)` with a row stride each: of a packed input they are its two halves, read where they lie.
One launch, tiles of some rows and some columns (`kernels/tiles.py`), everything in float32 (float64 for float64 input).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.fused_ln_act._core.arguments import check_choice
from kernel_pytorch.fused_ln_act._core.direct_calls import check_operands
from kernel_pytorch.fused_ln_act._core.launch import bind
from kernel_pytorch.fused_ln_act._core.plans import Planned
from kernel_pytorch.fused_ln_act._core.sizes import allocator, bytes_of, eviction_policy, exceeds_int32, reader, unmade
from kernel_pytorch.fused_ln_act.kernels.activations import activate, derivative, sigmoid, slope_of_silu
from kernel_pytorch.fused_ln_act.kernels.rows import as_rows
from kernel_pytorch.fused_ln_act.kernels.tiles import place, widest_tile

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
ELEMENTS, WARPS = 1024, 4  # of a tile


@triton.jit
def clamp_halves(gate, up, LIMIT: tl.constexpr):
    """Gate from above, up from both sides; NaN stays NaN."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate, up


@triton.jit
def activate_gate(gate, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, HALF: tl.constexpr):
    """The activation; for silu with the slope ALPHA in its sigmoid."""
    if ACTIVATION == "silu":
        return gate * sigmoid(ALPHA * gate, HALF)
    else:
        return activate(gate, ACTIVATION, HALF)


@triton.jit
def slope_of_gate(gate, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, HALF: tl.constexpr):
    """The derivative of `activate_gate`."""
    if ACTIVATION == "silu":
        return slope_of_silu(gate, ALPHA, HALF)
    else:
        return derivative(gate, ACTIVATION, HALF)


@triton.jit
def _gated_forward_kernel(
    gate_ptr, up_ptr, y_ptr, rows, columns, gate_stride, up_stride,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """This program computes one tile.

    gate, up: (T, I) with unit stride in I. y: (T, I) contiguous.
    """
    row, column, mask = place(rows, columns, ROWS, BLOCK, LONG_OFFSETS)
    wide = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0, eviction_policy=POLICY).to(wide)
    up = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0, eviction_policy=POLICY).to(wide)
    gate, up = clamp_halves(gate, up, LIMIT)
    HALF: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth == 16
    y = activate_gate(gate, ACTIVATION, ALPHA, HALF) * (up + OFFSET)
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@Planned
def gated(
    gate: Tensor, up: Tensor | None, activation: str, alpha: float, limit: float | None, offset: float
) -> Callable[..., Tensor]:
    """The launcher of the operator: one launch.

    Args:
        gate: `(..., I)`, or packed `(..., 2I)`, any strides.
        up: `(..., I)`; None where gate is packed.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        alpha: the slope of the sigmoid of "silu".
        limit: of both halves, or None.
        offset: added to up.

    Returns:
        `(..., I)`, contiguous, in the promoted dtype of gate and up.
    """
    check(gate, up, activation)
    columns = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    shape = (*gate.shape[:-1], columns)
    dtype = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)
    new_y = allocator(gate, shape, dtype)
    if 0 in shape:
        return lambda *arguments: new_y()
    halves, read = as_halves(gate, up), reader_of_halves(gate, up)
    walked = (*halves, unmade(shape, dtype))
    rows, tile = halves[0].shape[0], widest_tile(columns, ELEMENTS, WARPS)
    launch = bind(
        _gated_forward_kernel, tile.grid(rows, columns), rows, columns, *(half.stride(0) for half in halves),
        ACTIVATION=activation, ALPHA=alpha, LIMIT=limit, OFFSET=offset,
        LONG_OFFSETS=exceeds_int32(*walked), POLICY=eviction_policy(gate, bytes_of(*walked)), **tile.options,
    )  # fmt: skip

    def run(gate: Tensor, up: Tensor | None, *scalars: Any) -> Tensor:
        y = new_y()
        launch(*read(gate, up), y)
        return y

    return run


@Planned
def gated_linear(
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
) -> Callable[..., Tensor]:
    """The launcher of the operator: one launch, and PyTorch's product.

    Args:
        gate: `(..., I)`, any strides.
        up: as gate, in its dtype.
        weight: `(N, I)`, in the dtype of gate.

    Returns:
        `(..., N)` in the dtype of gate.
    """
    check_operands(weight=weight)
    check_layer(gate, up, weight)
    make = gated.plan_for(gate, up, activation, alpha, limit, offset).run
    return lambda gate, up, weight, *scalars: F.linear(make(gate, up), weight)


def check_layer(gate: Tensor, up: Tensor, weight: Tensor) -> None:
    """Raise unless the layer takes what gate and up make."""
    if weight.dim() != 2 or weight.shape[1:] != gate.shape[-1:]:
        raise ValueError(f"weight: shape is {tuple(weight.shape)}; it must be (N, I) of gate {tuple(gate.shape)}")
    if not gate.dtype == up.dtype == weight.dtype:
        raise TypeError(f"weight: dtype is {weight.dtype}; those of gate, {gate.dtype}, and up, {up.dtype}, must be it")


def check(gate: Tensor, up: Tensor | None, activation: str) -> None:
    """Check the arguments: direct operator calls pass no other check, and a wrong shape would read foreign memory."""
    check_choice("activation", activation, ACTIVATIONS)
    check_operands(gate=gate, up=up)
    if up is None and gate.shape[-1] % 2:
        raise ValueError(f"gate: shape is {tuple(gate.shape)}; packed, its last dimension must be even")
    if up is not None and up.shape != gate.shape:
        raise ValueError(f"up: shape is {tuple(up.shape)}; it must be that of gate, {tuple(gate.shape)}")


def as_halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up as `(T, I)` with unit stride in I; of a packed input its halves."""
    if up is not None:
        return as_rows(gate), as_rows(up)
    packed = as_rows(gate)
    columns = packed.shape[-1] // 2
    return packed[:, :columns], packed[:, columns:]


def reader_of_halves(gate: Tensor, up: Tensor | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """What gives a kernel the memory of `as_halves(gate, up)`."""
    read_gate, read_up = reader(gate, as_rows), reader(up, as_rows)
    if up is not None:
        return lambda gate, up: (read_gate(gate), read_up(up))
    columns = gate.shape[-1] // 2

    def read(packed: Tensor, up: None) -> tuple[Tensor, Tensor]:
        packed = read_gate(packed)
        return packed, packed.narrow(-1, columns, columns)

    return read
