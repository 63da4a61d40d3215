"""What of the backward pass is not a product of matrices alone: kernels, then the launchers.

The gradient at the pre-activation, `dz = dy * activation'(z)`, and its sum over the rows, the gradient of the bias.
With z or y saved that is a pass over memory (`_linear_saved_backward_kernel`); where nothing was saved, z is computed
again and dz is the epilogue of that product (`_linear_backward_kernel`). The gated kernels do the same for both halves
of a gated MLP, and give h again, which the gradient of the second weight needs. The gradients of x and of the weights
are plain products of dz, which `operators.py` leaves to cuBLAS. Sums over rows are made by shares in a fixed order, or
of few rows by one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.device import on_device, program_count
from kernel_pytorch.fused_ln_act._core.launch import cdiv, exceeds_int32
from kernel_pytorch.fused_ln_act.kernels.activations import activate, derivative
from kernel_pytorch.fused_ln_act.kernels.rows import add_shares, as_rows
from kernel_pytorch.fused_ln_act.kernels.tiles import Tile, tile_of_few

from .configurations import GATED_BACKWARD, LINEAR_BACKWARD
from .forward import add_bias, check, check_shape, multiply, multiply_gated
from .matmul import Shape, halves, load_tile, store_tile, tile_at

BLOCK = 128  # columns of a tile of the kernels that multiply nothing
TILE_BYTES = 4096  # of such a tile of 16-bit or 32-bit numbers
STAGES = 3  # of these tiles under way: one is computed, two are copied
PROGRAMS_PER_MULTIPROCESSOR = 4


@triton.jit
def _finish(
    tile, bias_ptr, dy, dz, shares_ptr, row, column, rows, columns, dy_stride,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, NEED_DZ: tl.constexpr, NEED_DBIAS: tl.constexpr,
    HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, PARTS: tl.constexpr,
    DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """The epilogue of a tile, part after part."""
    if PARTS > 1:
        left, right = halves(tile, ROWS, COLUMNS)
        _finish(left, bias_ptr, dy, dz, shares_ptr, row, column, rows, columns, dy_stride, ACTIVATION, HAS_BIAS,
                NEED_DZ, NEED_DBIAS, HALF, ROWS, COLUMNS // 2, TILE_ROWS, PARTS // 2, DESCRIPTORS,
                LONG_OFFSETS)  # fmt: skip
        _finish(right, bias_ptr, dy, dz, shares_ptr, row, column + COLUMNS // 2, rows, columns, dy_stride, ACTIVATION,
                HAS_BIAS, NEED_DZ, NEED_DBIAS, HALF, ROWS, COLUMNS // 2, TILE_ROWS, PARTS // 2, DESCRIPTORS,
                LONG_OFFSETS)  # fmt: skip
    else:
        z = add_bias(tile, bias_ptr, column, columns, COLUMNS, HAS_BIAS)
        incoming = load_tile(dy, row, column, rows, columns, dy_stride, 1, ROWS, COLUMNS, DESCRIPTORS, LONG_OFFSETS)
        gradient = incoming.to(z.dtype) * derivative(z, ACTIVATION, HALF)
        if NEED_DZ:
            store_tile(dz, gradient, row, column, rows, columns, columns, ROWS, COLUMNS, DESCRIPTORS, LONG_OFFSETS)
        if NEED_DBIAS:
            # Rows beyond the last have no incoming gradient, so they add nothing.
            place = column + tl.arange(0, COLUMNS)
            share = shares_ptr + (row // TILE_ROWS) * columns
            tl.store(share + place, tl.sum(gradient, axis=0), mask=place < columns)


@triton.jit
def _linear_backward_kernel(
    x, weight, bias_ptr, dy, dz, shares_ptr, rows, columns, depth,
    x_row_stride, x_column_stride, weight_row_stride, weight_column_stride, dy_stride,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, NEED_DZ: tl.constexpr, NEED_DBIAS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    FLATTEN: tl.constexpr, DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program computes every num_programs-th tile of `dy * activation'(x @ weight.T + bias)`.

    x: (M, K), weight: (N, K), dy: (M, N) with unit stride in N, dz: (M, N) contiguous, as descriptors or pointers.
    bias: (N). shares: (tiles in a column, N), the sum over the rows of each.
    """
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile_at(index, rows, columns, ROWS, COLUMNS, GROUP)
        tile = multiply(
            x, weight, row, column, rows, columns, depth, x_row_stride, x_column_stride, weight_row_stride,
            weight_column_stride, PRECISION, WIDE, ROWS, COLUMNS, DEPTH, DESCRIPTORS, LONG_OFFSETS,
        )  # fmt: skip
        _finish(tile, bias_ptr, dy, dz, shares_ptr, row, column, rows, columns, dy_stride, ACTIVATION, HAS_BIAS,
                NEED_DZ, NEED_DBIAS, HALF, ROWS, COLUMNS, ROWS, PARTS, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip


@triton.jit
def _finish_gated(
    gate, up, dh, h, dgate, dup, row, column, rows, columns, dh_stride,
    ACTIVATION: tl.constexpr, NEED_H: tl.constexpr, NEED_DZ: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, DESCRIPTORS: tl.constexpr,
    LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """The epilogue of two tiles, part after part."""
    if PARTS > 1:
        gate_left, gate_right = halves(gate, ROWS, COLUMNS)
        up_left, up_right = halves(up, ROWS, COLUMNS)
        _finish_gated(gate_left, up_left, dh, h, dgate, dup, row, column, rows, columns, dh_stride, ACTIVATION, NEED_H,
                      NEED_DZ, HALF, ROWS, COLUMNS // 2, PARTS // 2, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip
        _finish_gated(gate_right, up_right, dh, h, dgate, dup, row, column + COLUMNS // 2, rows, columns, dh_stride,
                      ACTIVATION, NEED_H, NEED_DZ, HALF, ROWS, COLUMNS // 2, PARTS // 2, DESCRIPTORS,
                      LONG_OFFSETS)  # fmt: skip
    else:
        activated = activate(gate, ACTIVATION, HALF)
        if NEED_H:
            store_tile(h, activated * up, row, column, rows, columns, columns, ROWS, COLUMNS, DESCRIPTORS, LONG_OFFSETS)
        if NEED_DZ:
            incoming = load_tile(dh, row, column, rows, columns, dh_stride, 1, ROWS, COLUMNS, DESCRIPTORS, LONG_OFFSETS)
            incoming = incoming.to(gate.dtype)
            store_tile(dup, incoming * activated, row, column, rows, columns, 2 * columns, ROWS, COLUMNS, DESCRIPTORS,
                       LONG_OFFSETS)  # fmt: skip
            gradient = incoming * up * derivative(gate, ACTIVATION, HALF)
            store_tile(dgate, gradient, row, column, rows, columns, 2 * columns, ROWS, COLUMNS, DESCRIPTORS,
                       LONG_OFFSETS)  # fmt: skip


@triton.jit
def _gated_linear_backward_kernel(
    x, gate_weight, up_weight, dh, h, dgate, dup, rows, columns, depth,
    x_row_stride, x_column_stride, weight_row_stride, weight_column_stride, dh_stride,
    ACTIVATION: tl.constexpr, NEED_H: tl.constexpr, NEED_DZ: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    FLATTEN: tl.constexpr, DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program computes tiles of gate and up again, and of them h and the gradients of both.

    x: (M, K), gate_weight and up_weight: (I, K), dh: (M, I) with unit stride in I, h: (M, I) contiguous, dgate and dup:
    the halves of (M, 2I) contiguous, as descriptors or pointers.
    """
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile_at(index, rows, columns, ROWS, COLUMNS, GROUP)
        gate, up = multiply_gated(
            x, gate_weight, up_weight, row, column, rows, columns, depth, x_row_stride, x_column_stride,
            weight_row_stride, weight_column_stride, PRECISION, WIDE, ROWS, COLUMNS, DEPTH, DESCRIPTORS, LONG_OFFSETS,
        )  # fmt: skip
        _finish_gated(gate, up, dh, h, dgate, dup, row, column, rows, columns, dh_stride, ACTIVATION, NEED_H, NEED_DZ,
                      HALF, ROWS, COLUMNS, PARTS, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip


@triton.jit
def _linear_saved_backward_kernel(
    dy_ptr, saved_ptr, dz_ptr, shares_ptr, rows, columns, dy_stride, saved_stride,
    ACTIVATION: tl.constexpr, NEED_DZ: tl.constexpr, NEED_DBIAS: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program walks down BLOCK columns of `dz = dy * activation'(z)`, from ROWS rows to the next of its own.

    dy: (M, N), saved: z, or y for relu, tanh and sigmoid, nothing for identity, (M, N), unit stride in N. dz: (M, N)
    contiguous. shares: (programs, N), the sum over the rows of each; of one program dbias itself.
    """
    HALF: tl.constexpr = dy_ptr.dtype.element_ty.primitive_bitwidth == 16
    program = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((ROWS, BLOCK), dtype=WIDE)
    for first in tl.range(program * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        if LONG_OFFSETS:
            row = row.to(tl.int64)
        mask = (row < rows) & (column < columns)
        gradient = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(WIDE)
        if ACTIVATION != "identity":
            saved = tl.load(saved_ptr + row * saved_stride + column, mask=mask, other=0.0).to(WIDE)
            if ACTIVATION == "relu":
                gradient = tl.where(saved > 0, gradient, 0.0)
            elif ACTIVATION == "tanh":
                gradient = gradient * (1.0 - saved * saved)
            elif ACTIVATION == "sigmoid":
                gradient = gradient * (saved * (1.0 - saved))
            else:
                gradient = gradient * derivative(saved, ACTIVATION, HALF)
        if NEED_DZ:
            tl.store(dz_ptr + row * columns + column, gradient.to(dz_ptr.dtype.element_ty), mask=mask)
        if NEED_DBIAS:
            total += gradient
    if NEED_DBIAS:
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        share = tl.sum(total, axis=0).to(shares_ptr.dtype.element_ty)
        tl.store(shares_ptr + program * columns + place, share, mask=place < columns)


@triton.jit
def _gated_linear_saved_backward_kernel(
    dh_ptr, saved_ptr, h_ptr, dz_ptr, rows, columns, dh_stride, saved_stride,
    ACTIVATION: tl.constexpr, NEED_H: tl.constexpr, NEED_DZ: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program computes a tile of h and of both halves of dz.

    dh: (M, I), saved: (M, 2I), unit stride in their rows. h: (M, I), dz: (M, 2I), contiguous.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    if LONG_OFFSETS:
        row = row.to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < columns)
    gate = tl.load(saved_ptr + row * saved_stride + column, mask=mask, other=0.0).to(WIDE)
    up = tl.load(saved_ptr + row * saved_stride + columns + column, mask=mask, other=0.0).to(WIDE)
    HALF: tl.constexpr = dh_ptr.dtype.element_ty.primitive_bitwidth == 16
    activated = activate(gate, ACTIVATION, HALF)
    if NEED_H:
        tl.store(h_ptr + row * columns + column, (activated * up).to(h_ptr.dtype.element_ty), mask=mask)
    if NEED_DZ:
        incoming = tl.load(dh_ptr + row * dh_stride + column, mask=mask, other=0.0).to(WIDE)
        gradient = incoming * up * derivative(gate, ACTIVATION, HALF)
        dz_row = dz_ptr + row * (2 * columns) + column
        tl.store(dz_row, gradient.to(dz_ptr.dtype.element_ty), mask=mask)
        tl.store(dz_row + columns, (incoming * activated).to(dz_ptr.dtype.element_ty), mask=mask)


def linear_act_backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    need_dz: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor]:
    """The launcher of the operator: one launch, and for the sum of many rows a small one.

    Args:
        dy: `(..., N)`, any strides.
        saved: `(..., N)`, the pre-activation, or the result for "relu", "tanh" and "sigmoid"; None where it is to be
            computed again, and for "identity".
        x: `(..., K)`.
        weight: `(N, K)`.
        bias: `(N,)` or None.
        activation: one of `ACTIVATIONS`.
        need_dz: whether the first result is there, which that of "identity", dy, never is.
        need_dbias: whether the second result is there; not without a bias.

    Returns:
        dz `(..., N)`, the gradient at the pre-activation, or `(0,)`; dbias `(N,)`, its sum over the rows, in the dtype
        of the bias, or `(0,)`; contiguous.
    """
    check(x, activation, {"weight": (weight, x.shape[-1])})
    columns, depth = weight.shape
    of_rows = (*x.shape[:-1], columns)
    check_shape("dy", dy, of_rows)
    check_shape("saved", saved, of_rows)
    check_shape("bias", bias, (columns,))
    need_dz, need_dbias = need_dz and activation != "identity", need_dbias and bias is not None
    like_bias = dy if bias is None else bias
    dz = torch.empty(dy.shape if need_dz else (0,), dtype=dy.dtype, device=dy.device)
    dbias = torch.empty((columns if need_dbias else 0,), dtype=like_bias.dtype, device=dy.device)
    rows = dy.numel() // columns
    if rows == 0:
        return dz, dbias.zero_()
    if not (need_dz or need_dbias):
        return dz, dbias
    incoming, outgoing = as_rows(dy), dz.view(rows, columns) if need_dz else None
    with on_device(dy):
        if saved is None and activation != "identity":
            shares = _recompute(incoming, x.reshape(-1, depth), weight, bias, outgoing, activation, need_dbias)
        else:
            shares = _differentiate(incoming, saved, outgoing, activation, dbias if need_dbias else None)
        if shares is not None:
            add_shares(shares[None], None, dbias)
    return dz, dbias


def _recompute(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, dz: Tensor | None, activation: str, need_dbias: bool
) -> Tensor | None:
    """Compute dz and return the shares of dbias, `(P, N)`."""
    rows, columns = dy.shape
    tensors = [t for t in (x, weight, dy, dz) if t is not None]
    shape = Shape(LINEAR_BACKWARD, rows, columns, x, tensors, exceeds_int32(*tensors))
    shares = None
    if need_dbias:
        down = cdiv(rows, shape.chosen.rows)
        shares = torch.empty((down, columns), dtype=torch.promote_types(dy.dtype, torch.float32), device=dy.device)
    _linear_backward_kernel[(shape.programs,)](
        shape.operand(x, shape.chosen.rows), shape.operand(weight, shape.chosen.columns),
        None if bias is None else bias.contiguous(), shape.result(dy), shape.result(dz), shares,
        rows, columns, x.shape[1], *x.stride(), *weight.stride(), dy.stride(0),
        ACTIVATION=activation, HAS_BIAS=bias is not None, NEED_DZ=dz is not None, NEED_DBIAS=need_dbias,
        **shape.constants,
    )  # fmt: skip
    return shares


def _differentiate(
    dy: Tensor, saved: Tensor | None, dz: Tensor | None, activation: str, dbias: Tensor | None
) -> Tensor | None:
    """Compute dz from what was saved, and dbias, of which more than one program return their shares, `(P, N)`."""
    rows, columns = dy.shape
    kept = None if saved is None else as_rows(saved)
    wide = torch.promote_types(dy.dtype, torch.float32)
    whole = None if dbias is None else tile_of_few(rows, columns, BLOCK)
    tile = Tile(TILE_BYTES // (BLOCK * dy.element_size()), BLOCK, 4) if whole is None else whole
    across, down = cdiv(columns, tile.block), cdiv(rows, tile.rows)
    programs = min(down, max(1, program_count(dy.device, PROGRAMS_PER_MULTIPROCESSOR) // across))
    shares = None
    if dbias is not None and programs > 1:
        shares = torch.empty((programs, columns), dtype=wide, device=dy.device)
    _linear_saved_backward_kernel[(across, programs)](
        dy, kept, dz, dbias if shares is None else shares, rows, columns,
        dy.stride(0), 0 if kept is None else kept.stride(0),
        ACTIVATION=activation, NEED_DZ=dz is not None, NEED_DBIAS=dbias is not None, WIDE=_triton_dtype(wide),
        STAGES=STAGES if whole is None else 1,  # a tile that is the only one is not copied ahead
        LONG_OFFSETS=exceeds_int32(*(t for t in (dy, kept, dz) if t is not None)), **tile.options,
    )  # fmt: skip
    return shares


def gated_mlp_backward(
    dh: Tensor, saved: Tensor | None, x: Tensor, w_gate_up: Tensor, activation: str, need_h: bool, need_dz: bool
) -> tuple[Tensor, Tensor]:
    """The launcher of the operator: the gradient at both halves of the pre-activation, and h once more.

    Args:
        dh: `(..., I)`, any strides.
        saved: `(..., 2I)`, the pre-activation; None where it is to be computed again.
        x: `(..., K)`.
        w_gate_up: `(2I, K)`.
        activation: one of `ACTIVATIONS`.
        need_h: whether the first result is there.
        need_dz: whether the second result is there.

    Returns:
        h `(..., I)`, or `(0,)`; dz `(..., 2I)`, or `(0,)`; contiguous.
    """
    check(x, activation, {"w_gate_up": (w_gate_up, x.shape[-1])})
    columns, depth = w_gate_up.shape[0] // 2, w_gate_up.shape[1]
    check_shape("dh", dh, (*x.shape[:-1], columns))
    check_shape("saved", saved, (*x.shape[:-1], w_gate_up.shape[0]))
    h = torch.empty(dh.shape if need_h else (0,), dtype=dh.dtype, device=dh.device)
    dz = torch.empty((*dh.shape[:-1], 2 * columns) if need_dz else (0,), dtype=dh.dtype, device=dh.device)
    rows = dh.numel() // columns
    if rows == 0 or not (need_h or need_dz):
        return h, dz
    incoming, hidden = as_rows(dh), h.view(rows, columns) if need_h else None
    with on_device(dh):
        if saved is None:
            halves_of_dz = dz.view(rows, 2 * columns).split(columns, 1) if need_dz else (None, None)
            results = [incoming, hidden, *halves_of_dz]
            matrix, weights = x.reshape(-1, depth), w_gate_up.split(columns)
            tensors = [t for t in (matrix, *weights, *results) if t is not None]
            shape = Shape(GATED_BACKWARD, rows, columns, x, tensors, exceeds_int32(*tensors))
            _gated_linear_backward_kernel[(shape.programs,)](
                shape.operand(matrix, shape.chosen.rows), *(shape.operand(w, shape.chosen.columns) for w in weights),
                *map(shape.result, results), rows, columns, depth, *matrix.stride(), *w_gate_up.stride(),
                incoming.stride(0), ACTIVATION=activation, NEED_H=need_h, NEED_DZ=need_dz, **shape.constants,
            )  # fmt: skip
        else:
            kept = as_rows(saved)
            tile_rows = TILE_BYTES // (BLOCK * dh.element_size())
            grid = cdiv(rows, tile_rows), cdiv(columns, BLOCK)
            _gated_linear_saved_backward_kernel[grid](
                incoming, kept, h, dz, rows, columns, incoming.stride(0), kept.stride(0),
                ACTIVATION=activation, NEED_H=need_h, NEED_DZ=need_dz,
                WIDE=_triton_dtype(torch.promote_types(dh.dtype, torch.float32)), ROWS=tile_rows, BLOCK=BLOCK,
                LONG_OFFSETS=exceeds_int32(incoming, kept), num_warps=4,
            )  # fmt: skip
    return h, dz


def _triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
