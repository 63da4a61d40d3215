"""The backward pass in Triton, except for the plain matrix products. Kernels, then the launchers.

The kernels compute `dz = dy * activation'(z)`, the gradient of the pre-activation, and its sum over the rows, the
gradient of the bias. If z or y was saved, that is a pass over memory (`_linear_saved_backward_kernel`); otherwise z is
recomputed and dz is the epilogue of that product (`_linear_backward_kernel`). The gated kernels do the same for both
halves of a gated MLP and also recompute h, which the gradient of the second weight needs. The gradients of x and of the
weights are plain products of dz, which `operators.py` leaves to cuBLAS. Sums over rows add shares in a fixed order;
with few rows, one program computes the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.device import program_count
from kernel_pytorch.fused_ln_act._core.launch import bind
from kernel_pytorch.fused_ln_act._core.plans import Planned
from kernel_pytorch.fused_ln_act._core.sizes import allocator, cdiv, exceeds_int32, reader, unmade
from kernel_pytorch.fused_ln_act._core.triton_matmul import halves, load_tile, rounding, store_tile, tile_at
from kernel_pytorch.fused_ln_act.kernels.activations import activate, derivative
from kernel_pytorch.fused_ln_act.kernels.rows import Sums, as_rows
from kernel_pytorch.fused_ln_act.kernels.tiles import Tile, tile_of_few

from .configurations import GATED_BACKWARD, LINEAR_BACKWARD
from .forward import add_bias, check, check_shape, matrix_of, multiply, multiply_gated
from .matmul import Shape

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
    """This program computes BLOCK columns of `dz = dy * activation'(z)` in every P-th tile of ROWS rows.

    dy: (M, N), saved: z, or y for relu, tanh and sigmoid, nothing for identity, (M, N), unit stride in N. dz: (M, N)
    contiguous. shares: (P, N), the sum over the rows of each of the P programs; with one program, dbias itself.
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


@functools.partial(Planned, state=lambda dy, saved, x, *others: rounding(x))
def linear_act_backward(
    dy: Tensor, saved: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None,
    activation: str, need_dz: bool, need_dbias: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:  # fmt: skip
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
    of_rows = (*x.shape[:-1], weight.shape[0])
    check_shape("dy", dy, of_rows)
    check_shape("saved", saved, of_rows)
    check_shape("bias", bias, weight.shape[:1])
    need_dz, need_dbias = need_dz and activation != "identity", need_dbias and bias is not None
    new_dz, new_dbias = allocator(dy, needed=need_dz), allocator(dy if bias is None else bias, needed=need_dbias)
    if dy.numel() == 0 or not (need_dz or need_dbias):
        return lambda *arguments: (new_dz(), new_dbias().zero_())
    if saved is None and activation != "identity":
        compute, sums = _plan_recomputation(dy, x, weight, bias, activation, need_dz, need_dbias)
    else:
        compute, sums = _plan_differentiation(dy, saved, activation, need_dz, need_dbias)

    def run(
        dy: Tensor, saved: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, *scalars: Any
    ) -> tuple[Tensor, Tensor]:
        dz, dbias = new_dz(), new_dbias()
        shares = dbias if sums is None else sums.shares()[0]
        compute(dy, saved, x, weight, bias, dz if need_dz else None, shares if need_dbias else None)
        if sums is not None:
            sums.add(shares, dbias, dbias)
        return dz, dbias

    return run


def _plan_recomputation(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, need_dz: bool, need_dbias: bool
) -> tuple[Callable[..., None], Sums | None]:
    """What computes dz and the shares of dbias, and the addition of those."""
    (columns, depth), as_matrix = weight.shape, matrix_of(x)
    matrix, dy_rows = as_matrix(x), as_rows(dy)
    rows = dy_rows.shape[0]
    dz = unmade((rows, columns), dy.dtype) if need_dz else None
    tensors = [t for t in (matrix, weight, dy_rows, dz) if t is not None]
    shape = Shape(LINEAR_BACKWARD, rows, columns, x, tensors, exceeds_int32(*tensors))
    launch = bind(
        _linear_backward_kernel, (shape.programs,),
        rows, columns, depth, *matrix.stride(), *weight.stride(), dy_rows.stride(0),
        described=[*shape.operands(matrix, weight), None, shape.result(dy_rows), shape.result(dz), None],
        ACTIVATION=activation, HAS_BIAS=bias is not None, NEED_DZ=need_dz, NEED_DBIAS=need_dbias, **shape.constants,
    )  # fmt: skip
    wide, down = torch.promote_types(dy.dtype, torch.float32), cdiv(rows, shape.chosen.rows)
    sums = Sums(down, columns, (False, True), dy, wide) if need_dbias else None
    read_dy, read_x, read_bias = reader(dy, as_rows), reader(x, as_matrix), reader(bias, Tensor.contiguous)
    return (
        lambda dy, saved, x, weight, bias, dz, shares: launch(
            read_x(x), weight, read_bias(bias), read_dy(dy), dz, shares
        )
    ), sums


def _plan_differentiation(
    dy: Tensor, saved: Tensor | None, activation: str, need_dz: bool, need_dbias: bool
) -> tuple[Callable[..., None], Sums | None]:
    """What computes dz from what was saved, and dbias or its shares, and the addition of those where there are any."""
    dy_rows, kept = as_rows(dy), None if saved is None else as_rows(saved)
    rows, columns = dy_rows.shape
    wide = torch.promote_types(dy.dtype, torch.float32)
    whole = tile_of_few(rows, columns, BLOCK) if need_dbias else None
    tile = Tile(TILE_BYTES // (BLOCK * dy.element_size()), BLOCK, 4) if whole is None else whole
    across, down = cdiv(columns, tile.block), cdiv(rows, tile.rows)
    programs = min(down, max(1, program_count(dy.device, PROGRAMS_PER_MULTIPROCESSOR) // across))
    walked = (dy_rows, kept, unmade((rows, columns), dy.dtype) if need_dz else None)
    launch = bind(
        _linear_saved_backward_kernel, (across, programs),
        rows, columns, dy_rows.stride(0), 0 if kept is None else kept.stride(0),
        ACTIVATION=activation, NEED_DZ=need_dz, NEED_DBIAS=need_dbias, WIDE=_triton_dtype(wide),
        STAGES=STAGES if whole is None else 1,  # a tile that is the only one is not copied ahead
        LONG_OFFSETS=exceeds_int32(*(t for t in walked if t is not None)), **tile.options,
    )  # fmt: skip
    sums = Sums(programs, columns, (False, True), dy, wide) if need_dbias and programs > 1 else None
    read_dy, read_saved = reader(dy, as_rows), reader(saved, as_rows)
    return lambda dy, saved, x, weight, bias, dz, shares: launch(read_dy(dy), read_saved(saved), dz, shares), sums


@functools.partial(Planned, state=lambda dh, saved, x, *others: rounding(x))
def gated_mlp_backward(
    dh: Tensor, saved: Tensor | None, x: Tensor, w_gate_up: Tensor, activation: str, need_h: bool, need_dz: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
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
    of_rows, columns = x.shape[:-1], w_gate_up.shape[0] // 2
    check_shape("dh", dh, (*of_rows, columns))
    check_shape("saved", saved, (*of_rows, w_gate_up.shape[0]))
    new_h, new_dz = allocator(dh, needed=need_h), allocator(dh, (*of_rows, 2 * columns), needed=need_dz)
    if dh.numel() == 0 or not (need_h or need_dz):
        return lambda *arguments: (new_h(), new_dz())
    flags = {"ACTIVATION": activation, "NEED_H": need_h, "NEED_DZ": need_dz}
    if saved is None:
        compute = _plan_gated_recomputation(dh, x, w_gate_up, flags)
    else:
        compute = _plan_gated_differentiation(dh, saved, flags)

    def run(dh: Tensor, saved: Tensor | None, x: Tensor, w_gate_up: Tensor, *scalars: Any) -> tuple[Tensor, Tensor]:
        h, dz = new_h(), new_dz()
        compute(dh, saved, x, w_gate_up, h, dz)
        return h, dz

    return run


def _plan_gated_recomputation(dh: Tensor, x: Tensor, w_gate_up: Tensor, flags: dict[str, Any]) -> Callable[..., None]:
    """What computes h and dz from x and the weights."""
    as_matrix, depth = matrix_of(x), x.shape[-1]
    matrix, weights, dh_rows = as_matrix(x), w_gate_up.split(w_gate_up.shape[0] // 2), as_rows(dh)
    rows, columns = dh_rows.shape
    need_h, need_dz = flags["NEED_H"], flags["NEED_DZ"]
    halves_of_dz = unmade((rows, 2 * columns), dh.dtype).split(columns, 1) if need_dz else (None, None)
    results = [dh_rows, unmade((rows, columns), dh.dtype) if need_h else None, *halves_of_dz]
    tensors = [t for t in (matrix, *weights, *results) if t is not None]
    shape = Shape(GATED_BACKWARD, rows, columns, x, tensors, exceeds_int32(*tensors))
    launch = bind(
        _gated_linear_backward_kernel, (shape.programs,),
        rows, columns, depth, *matrix.stride(), *w_gate_up.stride(), dh_rows.stride(0),
        described=[*shape.operands(matrix, *weights), *map(shape.result, results)], **flags, **shape.constants,
    )  # fmt: skip
    read_dh, read_x = reader(dh, as_rows), reader(x, as_matrix)

    def compute(dh: Tensor, saved: None, x: Tensor, w_gate_up: Tensor, h: Tensor, dz: Tensor) -> None:
        # The kernel needs only the start addresses of the halves.
        halves_of_dz = (dz, dz.narrow(-1, columns, columns)) if need_dz else (None, None)
        up_weight = w_gate_up.narrow(0, columns, columns)
        launch(read_x(x), w_gate_up, up_weight, read_dh(dh), h if need_h else None, *halves_of_dz)

    return compute


def _plan_gated_differentiation(dh: Tensor, saved: Tensor, flags: dict[str, Any]) -> Callable[..., None]:
    """What computes h and dz from what was saved."""
    dh_rows, kept = as_rows(dh), as_rows(saved)
    rows, columns = dh_rows.shape
    tile_rows = TILE_BYTES // (BLOCK * dh.element_size())
    launch = bind(
        _gated_linear_saved_backward_kernel, (cdiv(rows, tile_rows), cdiv(columns, BLOCK)),
        rows, columns, dh_rows.stride(0), kept.stride(0),
        WIDE=_triton_dtype(torch.promote_types(dh.dtype, torch.float32)), ROWS=tile_rows, BLOCK=BLOCK,
        LONG_OFFSETS=exceeds_int32(dh_rows, kept), num_warps=4, **flags,
    )  # fmt: skip
    read_dh, read_saved = reader(dh, as_rows), reader(saved, as_rows)
    return lambda dh, saved, x, w_gate_up, h, dz: launch(read_dh(dh), read_saved(saved), h, dz)


def _triton_dtype(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
