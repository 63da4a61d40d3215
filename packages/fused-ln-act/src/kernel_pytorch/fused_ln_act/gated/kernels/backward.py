"""The backward pass in Triton: both gradients in one kernel, the activation made again. The kernel, then the launcher.

    dgate = dy * (up + offset) * activation'(gate)      0 where gate was clamped
    dup   = dy * activation(gate)                       0 where up was clamped
    y     = activation(gate) * (up + offset)            recomputed if it was not saved

As in PyTorch, a clamp gives NaN no gradient, and relu none below zero, whatever up is.
One launch, which reads only dy, gate and up. For a packed input it writes both gradients into one packed tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.direct_calls import check_operands, check_shapes
from kernel_pytorch.fused_ln_act._core.launch import bind
from kernel_pytorch.fused_ln_act._core.plans import Planned
from kernel_pytorch.fused_ln_act._core.sizes import allocator, bytes_of, eviction_policy, exceeds_int32, reader, unmade
from kernel_pytorch.fused_ln_act.kernels.rows import as_rows
from kernel_pytorch.fused_ln_act.kernels.tiles import place, widest_tile

from .forward import activate_gate, as_halves, check, clamp_halves, reader_of_halves, slope_of_gate

ELEMENTS, WARPS = 1024, 8  # of a tile


@triton.jit
def _gated_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, y_ptr,
    rows, columns, dy_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    NEED_DGATE: tl.constexpr, NEED_DUP: tl.constexpr, NEED_Y: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """This program computes one tile. All tensors: (T, I) with unit stride in I; y is contiguous."""
    row, column, mask = place(rows, columns, ROWS, BLOCK, LONG_OFFSETS)
    wide = tl.float64 if dy_ptr.dtype.element_ty == tl.float64 else tl.float32
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0, eviction_policy=POLICY).to(wide)
    gate_given = tl.load(gate_ptr + row * gate_stride + column, mask=mask, other=0.0, eviction_policy=POLICY).to(wide)
    up_given = tl.load(up_ptr + row * up_stride + column, mask=mask, other=0.0, eviction_policy=POLICY).to(wide)
    HALF: tl.constexpr = dy_ptr.dtype.element_ty.primitive_bitwidth == 16
    gate, up = clamp_halves(gate_given, up_given, LIMIT)
    if NEED_DGATE:
        dgate = dy * (up + OFFSET) * slope_of_gate(gate, ACTIVATION, ALPHA, HALF)
        if LIMIT is not None:
            dgate = tl.where(gate_given <= LIMIT, dgate, 0.0)
        if ACTIVATION == "relu":
            dgate = tl.where(gate_given <= 0, 0.0, dgate)
        tl.store(dgate_ptr + row * dgate_stride + column, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if NEED_DUP:
        dup = dy * activate_gate(gate, ACTIVATION, ALPHA, HALF)
        if LIMIT is not None:
            dup = tl.where(tl.abs(up_given) <= LIMIT, dup, 0.0)
        tl.store(dup_ptr + row * dup_stride + column, dup.to(dup_ptr.dtype.element_ty), mask=mask)
    if NEED_Y:
        y = activate_gate(gate, ACTIVATION, ALPHA, HALF) * (up + OFFSET)
        tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@Planned
def gated_backward(dy: Tensor, gate: Tensor, up: Tensor | None, *scalars: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The launcher of the operator: dgate and dup, see `_plan`."""
    return _plan(dy, gate, up, *scalars, with_y=False)


@Planned
def gated_linear_backward(dh: Tensor, gate: Tensor, up: Tensor, *scalars: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The launcher of the operator that makes h, which goes into a layer, once more: h, dgate and dup, see `_plan`."""
    return _plan(dh, gate, up, *scalars, with_y=True)


def _plan(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
    need_dgate: bool,
    need_dup: bool,
    *,
    with_y: bool,
) -> Callable[..., tuple[Tensor, ...]]:
    """What launches the kernel, once, for dy `(..., I)` of any strides, and the rest as in the forward.

    It returns, `with_y`, the result of the forward once more; then dgate like gate (the packed gradient where gate is
    packed) and dup like up (nothing where gate is packed), contiguous, and empty where not needed.
    """
    check(gate, up, activation)
    check_operands(dy=dy)
    columns = gate.shape[-1] if up is not None else gate.shape[-1] // 2
    check_shapes(torch.Size((*gate.shape[:-1], columns)), dy=dy)
    packed, need_dup = up is None, need_dup and up is not None
    new_dgate, new_dup = allocator(gate, needed=need_dgate), allocator(gate if up is None else up, needed=need_dup)
    new_y = allocator(gate, dy.shape, dy.dtype)
    if dy.numel() == 0 or not (need_dgate or need_dup or with_y):
        return lambda *arguments: (*([new_y()] if with_y else []), new_dgate(), new_dup())
    dy_rows, halves = as_rows(dy), as_halves(gate, up)
    # Without memory rows of either have the stride that they will have.
    gradients = as_halves(unmade(gate.shape, gate.dtype), None if up is None else unmade(up.shape, up.dtype))
    read_dy, read = reader(dy, as_rows), reader_of_halves(gate, up)
    walked = (dy_rows, *halves, *gradients)
    moved = [t for t, need in zip(walked, (True, True, True, need_dgate, need_dup or packed), strict=True) if need]
    moved += [dy_rows] * with_y
    rows, tile = dy_rows.shape[0], widest_tile(columns, ELEMENTS, WARPS)
    launch = bind(
        _gated_backward_kernel, tile.grid(rows, columns), rows, columns, *(t.stride(0) for t in walked),
        ACTIVATION=activation, ALPHA=alpha, LIMIT=limit, OFFSET=offset, NEED_DGATE=need_dgate,
        NEED_DUP=need_dup or packed, NEED_Y=with_y,
        LONG_OFFSETS=exceeds_int32(*moved), POLICY=eviction_policy(gate, bytes_of(*moved)), **tile.options,
    )  # fmt: skip

    def run(dy: Tensor, gate: Tensor, up: Tensor | None, *scalars: Any) -> tuple[Tensor, ...]:
        dgate, dup = new_dgate(), new_dup()
        second = dgate.narrow(-1, columns, columns) if packed else dup
        if not with_y:
            launch(read_dy(dy), *read(gate, up), dgate, second, dgate)
            return dgate, dup
        y = new_y()
        launch(read_dy(dy), *read(gate, up), dgate, second, y)
        return y, dgate, dup

    return run
