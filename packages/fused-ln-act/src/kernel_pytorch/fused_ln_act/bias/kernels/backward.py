"""The backward pass in Triton: narrow blocks, few shares of the bias's gradient. The kernel, then the launcher.

    dx        = dropout(dy) * activation'(x + bias)
    dbias     = sum over rows of dx, before dx is rounded
    dresidual = dy, which takes no kernel

No sum runs over a row, so a row may be cut anywhere: one program takes a narrow block of columns and a share of the
rows, keeps its share of dbias in registers, and copies the next tiles into shared memory meanwhile. Narrow blocks make
few shares of each column, so that adding them in a fixed order (`kernels/rows.py`) moves next to nothing. With few
rows, one program takes all of them; if dbias is not needed, each tile gets a separate program. The mask is drawn again
from the seed. Without an activation x is neither saved nor read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.device import program_count
from kernel_pytorch.fused_ln_act._core.direct_calls import dtype_named
from kernel_pytorch.fused_ln_act._core.launch import bind
from kernel_pytorch.fused_ln_act._core.plans import Planned
from kernel_pytorch.fused_ln_act._core.sizes import allocator, cdiv, exceeds_int32, next_power_of_2, reader, unmade
from kernel_pytorch.fused_ln_act.kernels.activations import derivative
from kernel_pytorch.fused_ln_act.kernels.dropout import dropout, load_seed
from kernel_pytorch.fused_ln_act.kernels.rows import Sums, Walk, are_half, as_rows, stages
from kernel_pytorch.fused_ln_act.kernels.tiles import MOST_IN_GRID, tile_of_few, widest_tile

from .forward import check

ALONE = (2048, 8)  # elements and warps of a tile where nothing is summed
# Columns of a tile: 8 for every thread of one warp, or of two. With fewer columns per thread, the layouts of the bias
# and of x would differ, and the compiler would compute everything twice, once in each layout.
NARROW, WIDE = 256, 512
ELEMENTS_PER_WARP = 1024
TALLEST = 32  # rows of a tile, however narrow: they are added up in the end, and a long chain of sums loses digits
BYTES_AT_ONCE = 16384  # of dy in the tiles of all programs of a multiprocessor


@triton.jit
def _bias_backward_kernel(
    dy_ptr, x_ptr, bias_ptr, seed_ptr, dx_ptr, shares_ptr, rows, columns, dy_stride, x_stride,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT_P: tl.constexpr, HALF: tl.constexpr,
    NEED_DX: tl.constexpr, NEED_DBIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program takes every P-th tile of ROWS rows in one block of columns, and sums its share of dbias.

    dy, x: (T, N) with unit stride in N. bias: (N). seed: (). dx: (T, N) contiguous. shares: (P, N), of which a single
    one is dbias itself.
    """
    program = tl.program_id(1)
    wide = tl.float64 if dy_ptr.dtype.element_ty == tl.float64 else tl.float32
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    column_mask = column < columns
    seed = load_seed(seed_ptr, DROPOUT_P)
    bias = 0.0
    if HAS_BIAS and ACTIVATION != "identity":
        bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(wide)
    share = tl.zeros([ROWS, BLOCK], dtype=wide)
    lost = tl.zeros([ROWS, BLOCK], dtype=wide)

    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        if LONG_OFFSETS:
            row = row.to(tl.int64)
        mask = (row < rows) & column_mask
        dx = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(wide)
        if DROPOUT_P > 0.0:
            dx = dropout(dx, seed, row, column, columns, DROPOUT_P)
        if ACTIVATION != "identity":
            z = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0).to(wide)
            if HAS_BIAS:
                z += bias
            dx *= derivative(z, ACTIVATION, HALF)
        if NEED_DX:
            tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEED_DBIAS:
            if HALF:
                share += dx
            else:
                # What a sum of thousands of rows loses is above the last digit of float32: what rounding cuts off is
                # kept and added to the next term (Kahan, 1965).
                dx -= lost
                total = share + dx
                lost = (total - share) - dx
                share = total

    if NEED_DBIAS:
        column_out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        total = tl.sum(share, axis=0).to(shares_ptr.dtype.element_ty)
        tl.store(shares_ptr + program * columns + column_out, total, mask=column_out < columns)


@Planned
def bias_act_backward(
    dy: Tensor, x: Tensor | None, bias: Tensor | None, activation: str, need_dx: bool, need_dbias: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The launcher of the gradient of `bias_act`: one launch, and the addition of the shares where dbias has several.

    Args:
        dy: `(..., N)`, any strides.
        x: `(..., N)`, any strides; None for "identity", which needs none.
        need_dx: whether dx is computed.
        need_dbias: whether dbias is computed; not without a bias.

    Returns:
        dx like x, or in the dtype of dy without an x, and dbias like bias, contiguous; empty where not needed.
    """
    if x is None and activation != "identity":
        raise ValueError(f"x: given None; the derivative of {activation!r} needs it")
    run = plan(dy, x, bias, None, 0.0, activation, (dy if x is None else x).dtype, need_dx, need_dbias)
    return lambda dy, x, bias, *scalars: run(dy, x, bias, None)


@Planned
def bias_dropout_add_backward(
    dy: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, x_dtype: str, need_dx: bool, need_dbias: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The launcher of the gradient of `bias_dropout_add`, as that of `bias_act`.

    Args:
        dy: `(..., N)`, any strides.
        x_dtype: that of dx.
        need_dx: whether dx is computed.
        need_dbias: whether dbias is computed; not without a bias.

    Returns:
        dx in the dtype of x and dbias like bias, contiguous; empty where not needed.
    """
    run = plan(dy, None, bias, seed, p, "identity", dtype_named("x_dtype", x_dtype), need_dx, need_dbias)
    return lambda dy, bias, seed, *scalars: run(dy, None, bias, seed)


def plan(
    dy: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    activation: str,
    dx_dtype: torch.dtype,
    need_dx: bool,
    need_dbias: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """What computes dx and dbias of `(dy, x, bias, seed)` of this geometry."""
    check(dy, {"x": x}, bias, seed, dropout_p, activation)
    need_dbias = need_dbias and bias is not None
    new_dx = allocator(dy, dtype=dx_dtype, needed=need_dx)
    new_dbias = allocator((dy if x is None else x) if bias is None else bias, needed=need_dbias)
    if dy.numel() == 0 or not (need_dx or need_dbias):
        return lambda *arguments: (new_dx(), new_dbias().zero_())
    dy_rows, x_rows = as_rows(dy), None if x is None else as_rows(x)
    (rows, columns), drops = dy_rows.shape, dropout_p > 0.0
    way = walk(rows, columns, dy, 1 if x is None else 2) if need_dbias else apart(columns)
    blocks = cdiv(columns, way.block)
    at_once = max(1, program_count(dy.device, way.programs) // blocks) if need_dbias else MOST_IN_GRID
    programs = min(cdiv(rows, way.rows), at_once)
    walked = [t for t in (dy_rows, x_rows, unmade(dy.shape, dy.dtype) if need_dx else None) if t is not None]
    launch = bind(
        _bias_backward_kernel, (blocks, programs),
        rows, columns, dy_rows.stride(0), 0 if x_rows is None else x_rows.stride(0),
        HAS_BIAS=bias is not None, ACTIVATION=activation, DROPOUT_P=dropout_p, HALF=are_half(dy, x, bias),
        NEED_DX=need_dx, NEED_DBIAS=need_dbias, LONG_OFFSETS=exceeds_int32(*walked), **way.options,
    )  # fmt: skip
    sums = None
    if need_dbias and programs > 1:
        sums = Sums(programs, columns, (True, False), dy, torch.promote_types(dy.dtype, torch.float32))
    read_dy, read_x, read_bias = reader(dy, as_rows), reader(x, as_rows), reader(bias, Tensor.contiguous)

    def run(
        dy: Tensor, x: Tensor | None, bias: Tensor | None, seed: Tensor | None, *scalars: Any
    ) -> tuple[Tensor, Tensor]:
        dx, dbias = new_dx(), new_dbias()
        shares = dbias if sums is None else sums.shares()[0]
        launch(read_dy(dy), read_x(x), read_bias(bias), seed if drops else None, dx, shares)
        if sums is not None:
            sums.add(shares, dbias, dbias)
        return dx, dbias

    return run


def apart(columns: int) -> Walk:
    """Walk with a separate program for each tile, up to the limit of the grid; used if dbias is not needed."""
    shape = widest_tile(columns, *ALONE)
    return Walk(shape.rows, shape.block, shape.warps, 1, 1)


def walk(rows: int, columns: int, dy: Tensor, tensors: int) -> Walk:
    """Choose how programs walk `rows` rows of `columns` columns if they copy `tensors` tensors of that shape."""
    whole = tile_of_few(rows, columns, WIDE)
    if whole is not None:
        return Walk(whole.rows, whole.block, whole.warps, 1, 1)
    narrow, wide = (cdiv(columns, width) * width for width in (NARROW, WIDE))
    block = min(NARROW if narrow < wide else WIDE, next_power_of_2(columns))
    num_warps = max(1, block // NARROW)
    tile_rows = min(TALLEST, num_warps * ELEMENTS_PER_WARP // block)
    tile_bytes = tile_rows * block * dy.element_size()
    programs = BYTES_AT_ONCE // tile_bytes
    return Walk(tile_rows, block, num_warps, programs, stages(programs * tensors * tile_bytes, dy.device))
