"""The backward pass in Triton: both gradients in one kernel, the activation made again. The kernel, then the launcher.

    dgate = dy * (up + offset) * activation'(gate)      0 where gate was clamped
    dup   = dy * activation(gate)                       0 where up was clamped

As in PyTorch, a clamp gives NaN no gradient, and relu none below zero, whatever up is.
One launch; nothing but gate and up is read again. Of a packed input both gradients are written into one packed tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.device import on_device
from kernel_pytorch.fused_ln_act._core.direct_calls import check_floats, check_shapes
from kernel_pytorch.fused_ln_act._core.launch import bytes_of, eviction_policy, exceeds_int32
from kernel_pytorch.fused_ln_act.kernels.rows import as_rows
from kernel_pytorch.fused_ln_act.kernels.tiles import place, widest_tile

from .forward import activate_gate, as_halves, check, clamp_halves, slope_of_gate

ELEMENTS, WARPS = 1024, 8  # of a tile


@triton.jit
def _gated_backward_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr,
    rows, columns, dy_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    NEED_DGATE: tl.constexpr, NEED_DUP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """This program computes one tile. All tensors: (T, I) with unit stride in I."""
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


def gated_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
    need_dgate: bool,
    need_dup: bool,
) -> tuple[Tensor, Tensor]:
    """The launcher of the operator: `(dgate, dup)`; what is not needed comes back empty."""
    check(gate, up, activation)
    check_floats(dy=dy)
    check_shapes(gate.shape if up is not None else torch.Size((*gate.shape[:-1], gate.shape[-1] // 2)), dy=dy)
    return backward(dy, gate, up, activation, alpha, limit, offset, need_dgate, need_dup)


def backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
    need_dgate: bool,
    need_dup: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernel.

    Args:
        dy: `(..., I)`, any strides.
        gate: as in the forward.
        up: as in the forward.
        activation: as in the forward.
        alpha: as in the forward.
        limit: as in the forward.
        offset: as in the forward.
        need_dgate: whether dgate is computed; the packed gradient where gate is packed.
        need_dup: whether dup is computed; nothing where gate is packed.

    Returns:
        dgate like gate and dup like up, contiguous; empty where not needed.
    """
    need_dup = need_dup and up is not None
    like_up = gate if up is None else up
    dgate = torch.empty(gate.shape if need_dgate else (0,), dtype=gate.dtype, device=gate.device)
    dup = torch.empty(like_up.shape if need_dup else (0,), dtype=like_up.dtype, device=gate.device)
    if dy.numel() == 0 or not (need_dgate or need_dup):
        return dgate, dup
    columns = dy.shape[-1]
    dy_rows = as_rows(dy)
    rows = dy_rows.shape[0]
    gate_rows, up_rows = as_halves(gate, up)
    if up is None:
        dgate_rows, dup_rows = as_halves(dgate, None)
    else:
        dgate_rows, dup_rows = dgate.view(-1, columns), dup.view(-1, columns)
    walked = (dy_rows, gate_rows, up_rows, dgate_rows, dup_rows)
    shape = widest_tile(columns, ELEMENTS, WARPS)
    with on_device(gate):
        _gated_backward_kernel[shape.grid(rows, columns)](
            *walked, rows, columns, *(t.stride(0) for t in walked),
            ACTIVATION=activation, ALPHA=alpha, LIMIT=limit, OFFSET=offset,
            NEED_DGATE=need_dgate, NEED_DUP=need_dup or up is None,
            LONG_OFFSETS=exceeds_int32(*walked), POLICY=eviction_policy(gate, bytes_of(*walked)), **shape.options,
        )  # fmt: skip
    return dgate, dup
