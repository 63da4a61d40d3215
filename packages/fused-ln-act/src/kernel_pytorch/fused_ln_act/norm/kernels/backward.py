"""The backward pass in Triton: tiles copied ahead, sums over rows in a fixed order. Kernels, then the launcher.

With `x_hat` and `z = x_hat * weight + bias` made again from h and the statistics, everything in float32 (float64 for
float64 input):

    dz        = dropout(dy) * activation'(z)                dropout here without a residual only
    dweight   = sum over rows of dz * x_hat                 dbias = sum over rows of dz
    g         = dz * weight
    dresidual = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) + dh        without mean(g) for the RMS norm
    dx        = dropout(dresidual)                          dresidual itself without dropout or residual

A fixed number of programs walk the rows (`_backward_kernel`). Each keeps its shares of dweight and dbias in registers;
a second kernel adds the shares in a fixed order, so the result is bitwise reproducible. With few rows, each gets its
own program. Longer rows take a kernel for dx (`_backward_long_kernel`) and one for shares (`_parameter_shares_kernel`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.device import program_count
from kernel_pytorch.fused_ln_act._core.direct_calls import check_count, check_operands, dtype_named
from kernel_pytorch.fused_ln_act._core.launch import bind
from kernel_pytorch.fused_ln_act._core.plans import Planned
from kernel_pytorch.fused_ln_act._core.sizes import allocator, cdiv, exceeds_int32, next_power_of_2, reader
from kernel_pytorch.fused_ln_act.kernels.activations import derivative
from kernel_pytorch.fused_ln_act.kernels.dropout import dropout, load_seed
from kernel_pytorch.fused_ln_act.kernels.rows import (
    LONG_BLOCK,
    LONG_PROGRAMS_PER_MULTIPROCESSOR,
    LONG_WARPS,
    Sums,
    are_half,
    as_rows,
    product,
    walk,
)

from .forward import check

BLOCK_LIMIT = 8192  # columns of h, dy, the parameters and their gradients that one program holds in registers


@triton.jit
def dz_of(
    dy, x_hat, weight, bias, seed, row, column, columns, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT_P: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The gradient of what is activated."""
    if (DROPOUT_P > 0.0) and (not HAS_RESIDUAL):
        dy = dropout(dy, seed, row, column, columns, DROPOUT_P)
    if ACTIVATION != "identity":
        z = x_hat
        if HAS_WEIGHT:
            z = z * weight
        if HAS_BIAS:
            z = z + bias
        dy = product(dy, derivative(z, ACTIVATION, HALF))
    return dy


@triton.jit
def _through_norm(dz, x_hat, weight, rstd, columns, LAYER: tl.constexpr, HAS_WEIGHT: tl.constexpr):
    """The gradient of what is normalised, of whole rows."""
    if HAS_WEIGHT:
        dz = product(dz, tl.broadcast_to(weight, dz.shape))
    # The constants of a row first: of each element two multiplications and additions in one remain.
    if LAYER:
        # Both sums at once, so that the program waits for its warps half as often.
        along, mean_g = tl.split(tl.sum(tl.join(product(dz, x_hat), dz), axis=1) / columns)
        common = tl.fma(x_hat, -along[:, None] * rstd, -mean_g[:, None] * rstd)
    else:
        common = x_hat * (-tl.sum(product(dz, x_hat), axis=1, keep_dims=True) / columns * rstd)
    return tl.fma(dz, rstd, common)


@triton.jit
def _backward_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, bias_ptr, seed_ptr, statistics_ptr, dx_ptr, dresidual_ptr,
    dweight_ptr, dbias_ptr, rows, columns, dy_stride, dh_stride, h_stride,
    LAYER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT_P: tl.constexpr, HALF: tl.constexpr,
    NEED_DX: tl.constexpr, NEED_DRESIDUAL: tl.constexpr, NEED_DWEIGHT: tl.constexpr, NEED_DBIAS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program takes every P-th tile of ROWS rows, and sums its shares of dweight and dbias.

    dy, dh, h: (T, N) with unit stride in N. weight, bias: (N). seed: (). statistics: mean (T), with LAYER only, then
    rstd (T). dx, dresidual: (T, N) contiguous. dweight, dbias: shares (P, N); a single one is the gradient itself.
    """
    program = tl.program_id(0)
    wide = statistics_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)[None, :]
    column_mask = column < columns
    seed = load_seed(seed_ptr, DROPOUT_P)
    weight = 0.0
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(wide)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(wide)
    dweight = tl.zeros([ROWS, BLOCK], dtype=wide)
    dbias = tl.zeros([ROWS, BLOCK], dtype=wide)
    rstd_ptr = statistics_ptr
    if LAYER:
        rstd_ptr += rows

    for tile in tl.range(program, tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row_index = tile * ROWS + tl.arange(0, ROWS)
        if LONG_OFFSETS:
            row_index = row_index.to(tl.int64)
        # Before the axis of columns is added: a thread would load them once for every column that it holds.
        rstd = tl.load(rstd_ptr + row_index, mask=row_index < rows, other=0.0)[:, None]
        row = row_index[:, None]
        mask = (row < rows) & column_mask
        x_hat = tl.load(h_ptr + row * h_stride + column, mask=mask, other=0.0).to(wide)
        if LAYER:
            mean = tl.load(statistics_ptr + row_index, mask=row_index < rows, other=0.0)[:, None]
            x_hat = (x_hat - mean) * rstd  # not x_hat * rstd - mean * rstd, in which a large mean costs digits
        else:
            x_hat *= rstd
        dz = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(wide)
        if HAS_DH and STAGES == 1:  # else it is copied ahead, and takes registers where it is needed alone
            dh = tl.load(dh_ptr + row * dh_stride + column, mask=mask, other=0.0)
        dz = dz_of(
            dz, x_hat, weight, bias, seed, row, column, columns, HAS_RESIDUAL, HAS_WEIGHT, HAS_BIAS, ACTIVATION,
            DROPOUT_P, HALF,
        )  # fmt: skip
        if NEED_DWEIGHT:
            dweight += dz * x_hat
        if NEED_DBIAS:
            dbias += dz
        if NEED_DX or NEED_DRESIDUAL:
            dx = _through_norm(dz, x_hat, weight, rstd, columns, LAYER, HAS_WEIGHT)
            if HAS_DH:
                if STAGES > 1:
                    dh = tl.load(dh_ptr + row * dh_stride + column, mask=mask, other=0.0)
                dx += dh.to(wide)
            if NEED_DRESIDUAL:
                tl.store(dresidual_ptr + row * columns + column, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)
            if NEED_DX:
                if (DROPOUT_P > 0.0) and HAS_RESIDUAL:
                    dx = dropout(dx, seed, row, column, columns, DROPOUT_P)
                tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)

    column_out = tl.arange(0, BLOCK)
    if NEED_DWEIGHT:
        total = tl.sum(dweight, axis=0).to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + program * columns + column_out, total, mask=column_out < columns)
    if NEED_DBIAS:
        total = tl.sum(dbias, axis=0).to(dbias_ptr.dtype.element_ty)
        tl.store(dbias_ptr + program * columns + column_out, total, mask=column_out < columns)


@triton.jit
def g_of_block(
    dy_row, h_row, weight_ptr, bias_ptr, mean, rstd, seed, row, column, columns, HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT_P: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """`g` and `x_hat` of one block of a row."""
    mask = column < columns
    x_hat = (tl.load(h_row + column, mask=mask, other=0.0).to(rstd.dtype) - mean) * rstd
    dy = tl.load(dy_row + column, mask=mask, other=0.0).to(rstd.dtype)
    weight = 0.0
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(rstd.dtype)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=mask, other=0.0).to(rstd.dtype)
    g = dz_of(
        dy, x_hat, weight, bias, seed, row, column, columns, HAS_RESIDUAL, HAS_WEIGHT, HAS_BIAS, ACTIVATION, DROPOUT_P,
        HALF,
    )  # fmt: skip
    if HAS_WEIGHT:
        g = g * weight
    return g, x_hat


@triton.jit
def _backward_long_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, bias_ptr, seed_ptr, statistics_ptr, dx_ptr, dresidual_ptr,
    rows, columns, dy_stride, dh_stride, h_stride,
    LAYER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT_P: tl.constexpr, HALF: tl.constexpr,
    NEED_DX: tl.constexpr, NEED_DRESIDUAL: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program computes dx of one row, block by block: one walk for the means, one for the result."""
    row = tl.program_id(0)
    if LONG_OFFSETS:
        row = row.to(tl.int64)
    wide = statistics_ptr.dtype.element_ty
    seed = load_seed(seed_ptr, DROPOUT_P)
    mean = 0.0
    rstd_ptr = statistics_ptr
    if LAYER:
        mean = tl.load(statistics_ptr + row)
        rstd_ptr += rows
    rstd = tl.load(rstd_ptr + row)

    sums = tl.zeros([BLOCK], dtype=wide)
    products = tl.zeros([BLOCK], dtype=wide)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        g, x_hat = g_of_block(
            dy_ptr + row * dy_stride, h_ptr + row * h_stride, weight_ptr, bias_ptr, mean, rstd, seed, row, column,
            columns, HAS_RESIDUAL, HAS_WEIGHT, HAS_BIAS, ACTIVATION, DROPOUT_P, HALF,
        )  # fmt: skip
        sums += g
        products += g * x_hat
    mean_g = tl.sum(sums, axis=0) / columns
    mean_product = tl.sum(products, axis=0) / columns

    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        g, x_hat = g_of_block(
            dy_ptr + row * dy_stride, h_ptr + row * h_stride, weight_ptr, bias_ptr, mean, rstd, seed, row, column,
            columns, HAS_RESIDUAL, HAS_WEIGHT, HAS_BIAS, ACTIVATION, DROPOUT_P, HALF,
        )  # fmt: skip
        dx = g - x_hat * mean_product
        if LAYER:
            dx -= mean_g
        dx *= rstd
        if HAS_DH:
            dx += tl.load(dh_ptr + row * dh_stride + column, mask=mask, other=0.0).to(wide)
        if NEED_DRESIDUAL:
            tl.store(dresidual_ptr + row * columns + column, dx.to(dresidual_ptr.dtype.element_ty), mask=mask)
        if NEED_DX:
            if (DROPOUT_P > 0.0) and HAS_RESIDUAL:
                dx = dropout(dx, seed, row, column, columns, DROPOUT_P)
            tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _parameter_shares_kernel(
    dy_ptr, h_ptr, weight_ptr, bias_ptr, seed_ptr, statistics_ptr, dweight_ptr, dbias_ptr,
    rows, columns, dy_stride, h_stride,
    LAYER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT_P: tl.constexpr, HALF: tl.constexpr, NEED_DWEIGHT: tl.constexpr,
    NEED_DBIAS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program sums dz and dz * x_hat over every P-th row, for one block of columns."""
    program = tl.program_id(0)
    wide = statistics_ptr.dtype.element_ty
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column_mask = column < columns
    seed = load_seed(seed_ptr, DROPOUT_P)
    weight = 0.0
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0).to(wide)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(wide)
    dweight = tl.zeros([BLOCK], dtype=wide)
    dbias = tl.zeros([BLOCK], dtype=wide)
    rstd_ptr = statistics_ptr
    if LAYER:
        rstd_ptr += rows
    if LONG_OFFSETS:
        program = program.to(tl.int64)
    for row in range(program, rows, tl.num_programs(0)):
        x_hat = tl.load(h_ptr + row * h_stride + column, mask=column_mask, other=0.0).to(wide)
        if LAYER:
            x_hat -= tl.load(statistics_ptr + row)
        x_hat *= tl.load(rstd_ptr + row)
        dz = tl.load(dy_ptr + row * dy_stride + column, mask=column_mask, other=0.0).to(wide)
        dz = dz_of(
            dz, x_hat, weight, bias, seed, row, column, columns, HAS_RESIDUAL, HAS_WEIGHT, HAS_BIAS, ACTIVATION,
            DROPOUT_P, HALF,
        )  # fmt: skip
        if NEED_DWEIGHT:
            dweight += dz * x_hat
        if NEED_DBIAS:
            dbias += dz
    if NEED_DWEIGHT:
        tl.store(dweight_ptr + program * columns + column, dweight, mask=column_mask)
    if NEED_DBIAS:
        tl.store(dbias_ptr + program * columns + column, dbias, mask=column_mask)


@Planned
def norm_act_backward(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor | None,
    statistics: Tensor, eps: float, dropout_p: float, norm: str, activation: str, x_dtype: str, residual_dtype: str,
    need_dx: bool, need_dresidual: bool, need_dweight: bool, need_dbias: bool,
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """The launcher of the operator: one or two launches, and the addition of shares where there are several.

    It takes arguments of the forward; dy and dh `(..., N)`, the gradients of y and h, of any strides, dh or None;
    h `(..., N)`, the normalised tensor; the statistics of the forward, which contain eps; the dtypes of x and of the
    residual, empty without one (that decides where dropout was); and which gradients are wanted, by parameter.

    Returns:
        `dx` and `dresidual` `(..., N)`, `dweight` and `dbias` `(N,)`, each in the dtype of its tensor; else `(0,)`.
    """
    check(h, {"dy": dy, "dh": dh}, {"weight": weight, "bias": bias}, seed, dropout_p, norm, activation)
    check_operands(statistics=statistics)
    check_count(h.shape[:-1].numel() * (2 if norm == "layer" else 1), statistics=statistics)
    of_x = dtype_named("x_dtype", x_dtype)
    of_residual = dtype_named("residual_dtype", residual_dtype) if residual_dtype else of_x
    need_dresidual = need_dresidual and residual_dtype != ""
    needs = need_dx, need_dresidual, need_dweight and weight is not None, need_dbias and bias is not None
    new_dx = allocator(h, dtype=of_x, needed=need_dx)
    new_dresidual = allocator(h, dtype=of_residual, needed=need_dresidual)
    new_dweight = allocator(h if weight is None else weight, needed=needs[2])
    new_dbias = allocator(h if bias is None else bias, needed=needs[3])
    if h.numel() == 0:
        return lambda *arguments: (new_dx(), new_dresidual(), new_dweight().zero_(), new_dbias().zero_())
    drops, views = dropout_p > 0.0, (as_rows(dy), None if dh is None else as_rows(dh), as_rows(h))
    flags = {
        "LAYER": norm == "layer", "HAS_RESIDUAL": residual_dtype != "", "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None, "ACTIVATION": activation, "DROPOUT_P": dropout_p,
        "HALF": are_half(dy, h, weight, bias),
        "LONG_OFFSETS": exceeds_int32(*(v for v in views if v is not None)),
    }  # fmt: skip
    plan = _plan_one_block if next_power_of_2(h.shape[-1]) <= BLOCK_LIMIT else _plan_long_rows
    compute = plan(views, (weight, bias), statistics.dtype, needs, flags)
    read_dy, read_dh, read_h = (reader(t, as_rows) for t in (dy, dh, h))
    read_weight, read_bias, read_statistics = (reader(t, Tensor.contiguous) for t in (weight, bias, statistics))

    def run(
        dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor | None,
        statistics: Tensor, *scalars: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        gradients = new_dx(), new_dresidual(), new_dweight(), new_dbias()
        compute(
            read_dy(dy), read_dh(dh), read_h(h), read_weight(weight), read_bias(bias), seed if drops else None,
            read_statistics(statistics), *gradients,
        )  # fmt: skip
        return gradients

    return run


def _plan_one_block(
    views: tuple[Tensor, Tensor | None, Tensor], parameters: tuple[Tensor | None, ...], wide: torch.dtype,
    needs: tuple[bool, bool, bool, bool], flags: dict[str, Any],
) -> Callable[..., None]:  # fmt: skip
    """What fills the gradients: one launch, and one for the sums over rows where more than one program has a share."""
    dy, dh, h = views
    rows, columns = h.shape
    copied = [view for view in (h, dy, dh) if view is not None]
    way = walk(copied, parameters, flags["ACTIVATION"] != "identity")
    programs = min(cdiv(rows, way.rows), program_count(h.device, way.programs))
    launch = bind(
        _backward_kernel, (programs,), rows, columns, dy.stride(0), 0 if dh is None else dh.stride(0), h.stride(0),
        HAS_DH=dh is not None, NEED_DX=needs[0], NEED_DRESIDUAL=needs[1], NEED_DWEIGHT=needs[2], NEED_DBIAS=needs[3],
        **way.options, **flags,
    )  # fmt: skip
    if programs == 1 or not any(needs[2:]):
        return launch
    sums = Sums(programs, columns, needs[2:], h, wide)

    def compute(*tensors: Any) -> None:
        *others, dweight, dbias = tensors
        shares = sums.shares()
        launch(*others, *shares)
        sums.add(shares[0], dweight, dbias)

    return compute


def _plan_long_rows(
    views: tuple[Tensor, Tensor | None, Tensor], parameters: tuple[Tensor | None, ...], wide: torch.dtype,
    needs: tuple[bool, bool, bool, bool], flags: dict[str, Any],
) -> Callable[..., None]:  # fmt: skip
    """What fills the gradients: one launch for those of rows, one for shares of the sums over rows, one to add them."""
    dy, dh, h = views
    rows, columns = h.shape
    shape = {"BLOCK": LONG_BLOCK, "num_warps": LONG_WARPS}
    of_rows = bind(
        _backward_long_kernel, (rows,), rows, columns, dy.stride(0), 0 if dh is None else dh.stride(0), h.stride(0),
        HAS_DH=dh is not None, NEED_DX=needs[0], NEED_DRESIDUAL=needs[1], **flags, **shape,
    )  # fmt: skip
    blocks = cdiv(columns, LONG_BLOCK)
    walkers = program_count(h.device, LONG_PROGRAMS_PER_MULTIPROCESSOR)
    programs = min(rows, max(1, walkers // blocks))
    of_shares = bind(
        _parameter_shares_kernel, (programs, blocks), rows, columns, dy.stride(0), h.stride(0),
        NEED_DWEIGHT=needs[2], NEED_DBIAS=needs[3], **flags, **shape,
    )  # fmt: skip
    sums = Sums(programs, columns, needs[2:], h, wide)

    def compute(dy: Tensor, dh: Tensor | None, h: Tensor, *others: Any) -> None:
        *constants, dx, dresidual, dweight, dbias = others
        if any(needs[:2]):
            of_rows(dy, dh, h, *constants, dx, dresidual)
        if any(needs[2:]):
            shares = sums.shares()
            of_shares(dy, h, *constants, *shares)
            sums.add(shares[0], dweight, dbias)

    return compute
