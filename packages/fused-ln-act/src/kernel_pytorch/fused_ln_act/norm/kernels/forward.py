"""The forward pass in Triton: everything between two matrix products in one kernel. Kernels, then the launcher.

The input is seen as `(T, N)`: T rows of N columns. One launch for every combination of norm, residual, dropout and
activation. A row that fits in one block is read once and stays in registers (`_forward_kernel`): the mean first, then
the mean of the centred squares, so that a mean far from zero costs no digits. A longer one is walked twice
(`_forward_long_kernel`), the second time mostly out of the L2 cache; there each lane keeps the mean and the squares of
its own columns by Welford's method, and Chan's formula joins the lanes. How a row is summed up does not depend on how
many rows there are.

Welford, "Note on a Method for Calculating Corrected Sums of Squares and Products", 1962; Chan, Golub and LeVeque,
"Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.arguments import check_choice
from kernel_pytorch.fused_ln_act._core.device import program_count
from kernel_pytorch.fused_ln_act._core.direct_calls import check_operands
from kernel_pytorch.fused_ln_act._core.launch import Launch, bind
from kernel_pytorch.fused_ln_act._core.plans import Plan, Planned
from kernel_pytorch.fused_ln_act._core.sizes import (
    allocator,
    bytes_of,
    cdiv,
    eviction_policy,
    exceeds_int32,
    next_power_of_2,
    reader,
    unmade,
    warps,
)
from kernel_pytorch.fused_ln_act.kernels.activations import activate
from kernel_pytorch.fused_ln_act.kernels.dropout import check_seed, dropout, load_seed
from kernel_pytorch.fused_ln_act.kernels.rows import LONG_BLOCK, LONG_WARPS, are_shared_alike, as_rows, divide, product
from kernel_pytorch.fused_ln_act.rules.activations import ACTIVATIONS

BLOCK_LIMIT = 16384  # columns that one program holds in registers; a longer row is walked in blocks
# Elements of a program: two rows, where they fit into the larger number, or as many short ones as make the smaller.
SMALLEST_PROGRAM, LARGEST_PROGRAM = 2048, 4096
FEW_ROWS_PER_MULTIPROCESSOR = 2


@triton.jit
def add_dropped(x, residual, seed, row, column, columns, DROPOUT_P: tl.constexpr, H_DTYPE: tl.constexpr):
    """`residual + dropout(x)`, rounded as it is stored and wide again; `x` is wide."""
    if DROPOUT_P > 0.0:
        x = dropout(x, seed, row, column, columns, DROPOUT_P)
    return (residual.to(x.dtype) + x).to(H_DTYPE).to(x.dtype)


@triton.jit
def load_parameters(weight_ptr, bias_ptr, column, mask, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Load weight and bias of these columns; a missing one is 0 and unused."""
    weight = 0.0
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=mask, other=0.0)
    return weight, bias


@triton.jit
def finish(
    x_hat, weight, bias, seed, row, column, columns, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT_P: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Scale, shift, activate, and drop where nothing was dropped before."""
    y = x_hat
    if HAS_WEIGHT:
        y = y * weight.to(y.dtype)
    if HAS_BIAS:
        y = y + bias.to(y.dtype)
    y = activate(y, ACTIVATION, HALF)
    if (DROPOUT_P > 0.0) and (not HAS_RESIDUAL):
        y = dropout(y, seed, row, column, columns, DROPOUT_P)
    return y


@triton.jit
def store_statistics(statistics_ptr, mean, rstd, row, rows, mask, LAYER: tl.constexpr):
    """Mean, with LAYER only, and behind it rstd of these rows, where a gradient needs them."""
    if statistics_ptr is not None:
        if LAYER:
            tl.store(statistics_ptr + row, mean, mask=mask)
            tl.store(statistics_ptr + rows + row, rstd, mask=mask)
        else:
            tl.store(statistics_ptr + row, rstd, mask=mask)


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, seed_ptr, y_ptr, h_ptr, statistics_ptr,
    rows, columns, x_stride, residual_stride,
    LAYER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT_P: tl.constexpr, EPS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr, POLICY: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """This program normalises ROWS whole rows.

    x, residual: (T, N) with unit stride in N. weight, bias: (N). seed: (). y, h: (T, N) contiguous. statistics: mean
    (T), with LAYER only, and behind it rstd (T); None where no gradient needs them.
    """
    row_index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if LONG_OFFSETS:
        row_index = row_index.to(tl.int64)
    row = row_index[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    column_mask = column < columns
    mask = (row < rows) & column_mask
    wide = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    seed = load_seed(seed_ptr, DROPOUT_P)

    h = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0, eviction_policy=POLICY)
    residual = 0.0
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0, eviction_policy=POLICY)
    # With few rows, every load is issued before the first value is used: no other program would hide the latency of the
    # parameters. With many rows, other programs hide it, and the registers are better used for more programs.
    if FEW:
        weight, bias = load_parameters(weight_ptr, bias_ptr, column, column_mask, HAS_WEIGHT, HAS_BIAS)
    h = h.to(wide)
    if HAS_RESIDUAL:
        H_DTYPE: tl.constexpr = y_ptr.dtype.element_ty
        h = add_dropped(h, residual, seed, row, column, columns, DROPOUT_P, H_DTYPE)
        tl.store(h_ptr + row * columns + column, h.to(H_DTYPE), mask=mask)
    mean = 0.0
    if LAYER:
        mean = divide(tl.sum(h, axis=1), columns)
        h = h - mean[:, None]
    squares = tl.sum(tl.where(mask, product(h, h), 0.0), axis=1)
    rstd = tl.rsqrt(divide(squares, columns) + EPS)
    if LAYER:
        # With one column, h - mean is zero. An rstd of zero makes every gradient exactly zero too; otherwise, rounding
        # errors would be multiplied by 1 / sqrt(eps).
        rstd = tl.where(columns > 1, rstd, 0.0)
    store_statistics(statistics_ptr, mean, rstd, row_index, rows, row_index < rows, LAYER)

    if not FEW:
        weight, bias = load_parameters(weight_ptr, bias_ptr, column, column_mask, HAS_WEIGHT, HAS_BIAS)
    y = finish(
        h * rstd[:, None], weight, bias, seed, row, column, columns, HAS_RESIDUAL, HAS_WEIGHT, HAS_BIAS, ACTIVATION,
        DROPOUT_P, y_ptr.dtype.element_ty.primitive_bitwidth == 16,
    )  # fmt: skip
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _forward_long_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, seed_ptr, y_ptr, h_ptr, statistics_ptr,
    rows, columns, x_stride, residual_stride,
    LAYER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT_P: tl.constexpr, EPS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr, POLICY: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """This program normalises one row, block by block: one walk for the statistics, one for the result."""
    row = tl.program_id(0)
    if LONG_OFFSETS:
        row = row.to(tl.int64)
    x_row = x_ptr + row * x_stride
    residual_row = residual_ptr
    if HAS_RESIDUAL:
        residual_row += row * residual_stride
    wide = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    H_DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    seed = load_seed(seed_ptr, DROPOUT_P)

    means = tl.zeros([BLOCK], dtype=wide)
    squares = tl.zeros([BLOCK], dtype=wide)
    counts = tl.zeros([BLOCK], dtype=wide)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        h = tl.load(x_row + column, mask=mask, other=0.0, eviction_policy="evict_last").to(wide)
        if HAS_RESIDUAL:
            residual = tl.load(residual_row + column, mask=mask, other=0.0, eviction_policy="evict_last")
            h = add_dropped(h, residual, seed, row, column, columns, DROPOUT_P, H_DTYPE)
            tl.store(h_ptr + row * columns + column, h.to(H_DTYPE), mask=mask)
        if LAYER:
            counts += mask.to(wide)
            delta = tl.where(mask, h - means, 0.0)
            means += delta / (start // BLOCK + 1)
            squares += delta * (h - means)
        else:
            squares += h * h
    mean = 0.0
    if LAYER:
        mean = divide(tl.sum(means * counts, axis=0), columns)
        apart = tl.where(counts > 0.0, means - mean, 0.0)
        squares += counts * apart * apart
    rstd = tl.rsqrt(divide(tl.sum(squares, axis=0), columns) + EPS)
    store_statistics(statistics_ptr, mean, rstd, row, rows, None, LAYER)

    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        # The sum is made again rather than read back: another thread of this program may have stored it.
        h = tl.load(x_row + column, mask=mask, other=0.0, eviction_policy=POLICY).to(wide)
        if HAS_RESIDUAL:
            residual = tl.load(residual_row + column, mask=mask, other=0.0, eviction_policy=POLICY)
            h = add_dropped(h, residual, seed, row, column, columns, DROPOUT_P, H_DTYPE)
        weight, bias = load_parameters(weight_ptr, bias_ptr, column, mask, HAS_WEIGHT, HAS_BIAS)
        y = finish(
            (h - mean) * rstd, weight, bias, seed, row, column, columns, HAS_RESIDUAL, HAS_WEIGHT, HAS_BIAS, ACTIVATION,
            DROPOUT_P, y_ptr.dtype.element_ty.primitive_bitwidth == 16,
        )  # fmt: skip
        tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@Planned
def norm_act(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
) -> Plan:
    """The launcher of the operator: one launch.

    Args:
        x: `(..., N)`, any strides.
        residual: `(..., N)` or None.
        weight: `(N,)` or None.
        bias: `(N,)` or None.
        seed: int64 `()`, or None where `dropout_p` is 0.
        eps: added to the variance or mean square.
        dropout_p: applied to x with a residual, else to y.
        norm: "layer" or "rms".
        activation: one of `ACTIVATIONS`.

    Returns:
        `y` `(..., N)`; `h`, which is `residual + dropout(x)`, or `(0,)` without a residual; the statistics in float32
        (float64 for float64 input), `(2, ...)` for "layer": mean and rstd, `(1, ...)` for "rms": rstd. All contiguous.
    """
    check(x, {"residual": residual}, {"weight": weight, "bias": bias}, seed, dropout_p, norm, activation)
    layer, added, drops = norm == "layer", residual is not None, dropout_p > 0.0
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    new_y, new_h = allocator(x, dtype=dtype), allocator(x, dtype=dtype, needed=added)
    new_statistics = allocator(x, (2 if layer else 1, *x.shape[:-1]), torch.promote_types(dtype, torch.float32))
    if x.numel() == 0:
        return Plan(lambda *arguments: (new_y(), new_h(), new_statistics().zero_()))
    x_rows = as_rows(x)
    views = [x_rows] if residual is None else [x_rows, as_rows(residual)]
    launch = _bind_forward(
        [*views, unmade(x.shape, dtype)], (weight, bias),
        {"LAYER": layer, "HAS_RESIDUAL": added, "ACTIVATION": activation, "DROPOUT_P": dropout_p, "EPS": eps},
    )  # fmt: skip
    launch_alone = launch.twin()
    read_x, read_residual = reader(x, as_rows), reader(residual, as_rows)
    read_weight, read_bias = reader(weight, Tensor.contiguous), reader(bias, Tensor.contiguous)

    def run(
        x: Tensor, residual: Any, weight: Any, bias: Any, seed: Any, *scalars: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, h, statistics = new_y(), new_h(), new_statistics()
        inputs = read_x(x), read_residual(residual), read_weight(weight), read_bias(bias), seed if drops else None
        launch(*inputs, y, h if added else None, statistics)
        return y, h, statistics

    def alone(x: Tensor, residual: Any, weight: Any, bias: Any, seed: Any, *scalars: Any) -> Any:
        y, h = new_y(), new_h() if added else None
        inputs = read_x(x), read_residual(residual), read_weight(weight), read_bias(bias), seed if drops else None
        launch_alone(*inputs, y, h, None)
        return y if h is None else (y, h)

    return Plan(run, alone)


def _bind_forward(walked: Sequence[Tensor], parameters: Sequence[Tensor | None], flags: dict[str, Any]) -> Launch:
    """The launch for x, perhaps a residual, and y, seen by rows."""
    views, x = walked[:-1], walked[0]
    rows, columns = x.shape
    kernel = _forward_kernel
    few = rows <= program_count(x.device, FEW_ROWS_PER_MULTIPROCESSOR)
    rows_per_program, block, num_warps = shape_of(few, views, parameters)
    if block > BLOCK_LIMIT:
        kernel, block, rows_per_program, num_warps = _forward_long_kernel, LONG_BLOCK, 1, LONG_WARPS
    return bind(
        kernel, (cdiv(rows, rows_per_program),),
        rows, columns, x.stride(0), views[1].stride(0) if len(views) > 1 else 0,
        HAS_WEIGHT=parameters[0] is not None, HAS_BIAS=parameters[1] is not None,
        ROWS=rows_per_program, BLOCK=block, LONG_OFFSETS=exceeds_int32(*walked),
        POLICY=eviction_policy(x, bytes_of(*walked)), FEW=few and kernel is _forward_kernel, num_warps=num_warps,
        **flags,
    )  # fmt: skip


def check(
    x: Tensor, like_x: Mapping[str, Tensor | None], parameters: Mapping[str, Tensor | None], seed: Tensor | None,
    dropout_p: float, norm: str, activation: str,
) -> None:  # fmt: skip
    """Check the arguments: direct operator calls pass no other check, and a wrong shape would read foreign memory."""
    check_choice("norm", norm, ("layer", "rms"))
    check_choice("activation", activation, ACTIVATIONS)
    check_operands(x=x, **like_x, **parameters)
    for name, tensor in like_x.items():
        if tensor is not None and tensor.shape != x.shape:
            raise ValueError(f"{name}: shape is {tuple(tensor.shape)}; it must be that of x, {tuple(x.shape)}")
    for name, tensor in parameters.items():
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise ValueError(f"{name}: shape is {tuple(tensor.shape)}; for x of {tuple(x.shape)} it must be its end")
    check_seed(seed, dropout_p)


def shape_of(few: bool, views: Sequence[Tensor], parameters: Sequence[Tensor | None]) -> tuple[int, int, int]:
    """Rows and columns of a program, and its warps, for x and perhaps a residual, and whether there are few rows."""
    block = next_power_of_2(views[0].shape[-1])
    rows = max(1, min(LARGEST_PROGRAM // block, max(2, SMALLEST_PROGRAM // block)))
    # With a residual there are two loads of each element, and enough under way with half as many elements.
    num_warps = warps(rows * block, 16 if len(views) > 1 or views[0].element_size() > 2 else 32)
    if few and are_shared_alike(block, num_warps, views, parameters):
        rows = 1
    return rows, block, num_warps
