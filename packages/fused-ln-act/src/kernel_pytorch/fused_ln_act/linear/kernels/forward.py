"""The forward pass in Triton: a persistent product with what follows it inside. Kernels, then the launchers.

x is seen as `(M, K)`, a weight is `(N, K)` as `torch.nn.Linear` has it. Programs stay on their multiprocessor and walk
the tiles of the result. What follows the product happens in its registers, while the tile is there: one launch, and
the pre-activation is written only if the caller requests it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.arguments import check_choice
from kernel_pytorch.fused_ln_act._core.direct_calls import check_memory, check_operands, check_shapes
from kernel_pytorch.fused_ln_act._core.launch import bind
from kernel_pytorch.fused_ln_act._core.plans import Planned
from kernel_pytorch.fused_ln_act._core.sizes import allocator, exceeds_int32, reader, unmade
from kernel_pytorch.fused_ln_act._core.triton_matmul import halves, load_tile, rounding, store_tile, tile_at
from kernel_pytorch.fused_ln_act.kernels.activations import activate
from kernel_pytorch.fused_ln_act.rules.activations import ACTIVATIONS

from .configurations import GATED, LINEAR
from .matmul import Shape


@triton.jit
def multiply(
    x, weight, row, column, rows, columns, depth,
    x_row_stride, x_column_stride, weight_row_stride, weight_column_stride,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """A tile of `x @ weight.T`."""
    total = tl.zeros((ROWS, COLUMNS), dtype=WIDE)
    for step in range(tl.cdiv(depth, DEPTH)):
        a = load_tile(x, row, step * DEPTH, rows, depth, x_row_stride, x_column_stride, ROWS, DEPTH, DESCRIPTORS,
                      LONG_OFFSETS)  # fmt: skip
        b = load_tile(weight, column, step * DEPTH, columns, depth, weight_row_stride, weight_column_stride, COLUMNS,
                      DEPTH, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip
        total = tl.dot(a, b.T, total, input_precision=PRECISION, out_dtype=WIDE)
    return total


@triton.jit
def multiply_gated(
    x, gate_weight, up_weight, row, column, rows, columns, depth,
    x_row_stride, x_column_stride, weight_row_stride, weight_column_stride,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Tiles at the same place of `x @ gate_weight.T` and `x @ up_weight.T`: x is read once for both."""
    gate = tl.zeros((ROWS, COLUMNS), dtype=WIDE)
    up = tl.zeros((ROWS, COLUMNS), dtype=WIDE)
    for step in range(tl.cdiv(depth, DEPTH)):
        a = load_tile(x, row, step * DEPTH, rows, depth, x_row_stride, x_column_stride, ROWS, DEPTH, DESCRIPTORS,
                      LONG_OFFSETS)  # fmt: skip
        b = load_tile(gate_weight, column, step * DEPTH, columns, depth, weight_row_stride, weight_column_stride,
                      COLUMNS, DEPTH, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip
        c = load_tile(up_weight, column, step * DEPTH, columns, depth, weight_row_stride, weight_column_stride,
                      COLUMNS, DEPTH, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip
        gate = tl.dot(a, b.T, gate, input_precision=PRECISION, out_dtype=WIDE)
        up = tl.dot(a, c.T, up, input_precision=PRECISION, out_dtype=WIDE)
    return gate, up


@triton.jit
def add_bias(tile, bias_ptr, column, columns, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Add the bias of the columns of a tile."""
    if HAS_BIAS:
        place = column + tl.arange(0, COLUMNS)
        bias = tl.load(bias_ptr + place, mask=place < columns, other=0.0)
        tile = tile + bias.to(tile.dtype)[None, :]
    return tile


@triton.jit
def _finish(
    tile, bias_ptr, y, preactivation, row, column, rows, columns,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, DESCRIPTORS: tl.constexpr,
    LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """The epilogue of a tile, part after part."""
    if PARTS > 1:
        left, right = halves(tile, ROWS, COLUMNS)
        _finish(left, bias_ptr, y, preactivation, row, column, rows, columns, ACTIVATION, HAS_BIAS, SAVE, HALF, ROWS,
                COLUMNS // 2, PARTS // 2, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip
        _finish(right, bias_ptr, y, preactivation, row, column + COLUMNS // 2, rows, columns, ACTIVATION, HAS_BIAS,
                SAVE, HALF, ROWS, COLUMNS // 2, PARTS // 2, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip
    else:
        tile = add_bias(tile, bias_ptr, column, columns, COLUMNS, HAS_BIAS)
        if SAVE:
            store_tile(preactivation, tile, row, column, rows, columns, columns, ROWS, COLUMNS, DESCRIPTORS,
                       LONG_OFFSETS)  # fmt: skip
        store_tile(y, activate(tile, ACTIVATION, HALF), row, column, rows, columns, columns, ROWS, COLUMNS,
                   DESCRIPTORS, LONG_OFFSETS)  # fmt: skip


@triton.jit
def _linear_kernel(
    x, weight, bias_ptr, y, preactivation, rows, columns, depth,
    x_row_stride, x_column_stride, weight_row_stride, weight_column_stride,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    FLATTEN: tl.constexpr, DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program computes every num_programs-th tile of `activation(x @ weight.T + bias)`.

    x: (M, K), weight: (N, K), y and preactivation: (M, N) contiguous, as descriptors or pointers. bias: (N).
    """
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile_at(index, rows, columns, ROWS, COLUMNS, GROUP)
        tile = multiply(
            x, weight, row, column, rows, columns, depth, x_row_stride, x_column_stride, weight_row_stride,
            weight_column_stride, PRECISION, WIDE, ROWS, COLUMNS, DEPTH, DESCRIPTORS, LONG_OFFSETS,
        )  # fmt: skip
        _finish(tile, bias_ptr, y, preactivation, row, column, rows, columns, ACTIVATION, HAS_BIAS, SAVE, HALF, ROWS,
                COLUMNS, PARTS, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip


@triton.jit
def _finish_gated(
    gate, up, h, saved_gate, saved_up, row, column, rows, columns, saved_stride,
    ACTIVATION: tl.constexpr, SAVE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """The epilogue of two tiles, part after part."""
    if PARTS > 1:
        gate_left, gate_right = halves(gate, ROWS, COLUMNS)
        up_left, up_right = halves(up, ROWS, COLUMNS)
        _finish_gated(gate_left, up_left, h, saved_gate, saved_up, row, column, rows, columns, saved_stride, ACTIVATION,
                      SAVE, HALF, ROWS, COLUMNS // 2, PARTS // 2, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip
        _finish_gated(gate_right, up_right, h, saved_gate, saved_up, row, column + COLUMNS // 2, rows, columns,
                      saved_stride, ACTIVATION, SAVE, HALF, ROWS, COLUMNS // 2, PARTS // 2, DESCRIPTORS,
                      LONG_OFFSETS)  # fmt: skip
    else:
        if SAVE:
            store_tile(saved_gate, gate, row, column, rows, columns, saved_stride, ROWS, COLUMNS, DESCRIPTORS,
                       LONG_OFFSETS)  # fmt: skip
            store_tile(saved_up, up, row, column, rows, columns, saved_stride, ROWS, COLUMNS, DESCRIPTORS,
                       LONG_OFFSETS)  # fmt: skip
        store_tile(h, activate(gate, ACTIVATION, HALF) * up, row, column, rows, columns, columns, ROWS, COLUMNS,
                   DESCRIPTORS, LONG_OFFSETS)  # fmt: skip


@triton.jit
def _gated_linear_kernel(
    x, gate_weight, up_weight, h, saved_gate, saved_up, rows, columns, depth,
    x_row_stride, x_column_stride, weight_row_stride, weight_column_stride, saved_stride,
    ACTIVATION: tl.constexpr, SAVE: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    FLATTEN: tl.constexpr, DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program computes every num_programs-th tile of `activation(x @ gate_weight.T) * (x @ up_weight.T)`.

    x: (M, K), gate_weight and up_weight: (I, K), h: (M, I) contiguous, saved_gate and saved_up: (M, I) with unit stride
    in their rows, all as descriptors or pointers.
    """
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row, column = tile_at(index, rows, columns, ROWS, COLUMNS, GROUP)
        gate, up = multiply_gated(
            x, gate_weight, up_weight, row, column, rows, columns, depth, x_row_stride, x_column_stride,
            weight_row_stride, weight_column_stride, PRECISION, WIDE, ROWS, COLUMNS, DEPTH, DESCRIPTORS, LONG_OFFSETS,
        )  # fmt: skip
        _finish_gated(gate, up, h, saved_gate, saved_up, row, column, rows, columns, saved_stride, ACTIVATION, SAVE,
                      HALF, ROWS, COLUMNS, PARTS, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip


@functools.partial(Planned, state=rounding)
def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_preactivation: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The launcher of the operator: `(y, preactivation)`; what is not to be saved is empty."""
    check(x, activation, {"weight": (weight, x.shape[-1])})
    check_shape("bias", bias, (weight.shape[0],))
    return plan_linear(x, weight, bias, activation, save_preactivation)


@functools.partial(Planned, state=rounding)
def gated_mlp(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str, save_preactivation: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The launcher of the operator: `(y, preactivation)` from two kernels; what is not to be saved is empty."""
    check(x, activation, {"w_gate_up": (w_gate_up, x.shape[-1]), "w_down": (w_down, w_gate_up.shape[0] // 2)})
    if w_gate_up.shape[0] % 2:
        raise ValueError(f"w_gate_up: shape is {tuple(w_gate_up.shape)}; its first dimension must be even")
    up = plan_gated_linear(x, w_gate_up, activation, save_preactivation)
    down = plan_linear(x.new_empty((*x.shape[:-1], w_down.shape[1])), w_down, None, "identity", False)

    def run(x: Tensor, w_gate_up: Tensor, w_down: Tensor, *scalars: Any) -> tuple[Tensor, Tensor]:
        h, preactivation = up(x, w_gate_up)
        return down(h, w_down, None)[0], preactivation

    return run


def check(x: Tensor, activation: str, matrices: Mapping[str, tuple[Tensor, int]]) -> None:
    """Check the arguments: direct operator calls pass no other check, and a wrong shape would read foreign memory.

    Args:
        x: the principal argument.
        activation: as given.
        matrices: by name, a weight and how many columns it must have.
    """
    check_choice("activation", activation, ACTIVATIONS)
    check_operands(x=x)
    for name, (matrix, columns) in matrices.items():
        check_memory(name, matrix)
        if matrix.dtype != x.dtype:
            raise TypeError(f"{name}: dtype is {matrix.dtype}; it must be that of x, {x.dtype}")
        if matrix.dim() != 2 or matrix.shape[1] != columns:
            raise ValueError(f"{name}: shape is {tuple(matrix.shape)}; it must have two dimensions, the last {columns}")


def check_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise unless this is None or a tensor of floats of this shape."""
    check_operands(**{name: tensor})
    check_shapes(torch.Size(shape), **{name: tensor})


def plan_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_preactivation: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """How the linear kernel is launched for tensors of this geometry.

    Args:
        x: `(..., K)`, any strides.
        weight: `(N, K)` in the dtype of x, any strides.
        bias: `(N,)` or None.
        activation: one of `ACTIVATIONS`.
        save_preactivation: whether the second result is there.

    Returns:
        A function of `(x, weight, bias)` that returns `y` `(..., N)`, and `x @ weight.T + bias` of the same shape, or
        `(0,)`; contiguous, in the dtype of x.
    """
    (columns, depth), rows = weight.shape, x.shape[:-1].numel()
    new_y = allocator(x, (*x.shape[:-1], columns))
    new_preactivation = allocator(x, (*x.shape[:-1], columns), needed=save_preactivation)
    if rows * columns == 0:
        return lambda *arguments: (new_y(), new_preactivation())
    as_matrix = matrix_of(x)
    matrix, result = as_matrix(x), unmade((rows, columns), x.dtype)
    results = [result, result if save_preactivation else None]
    tensors = [t for t in (matrix, weight, *results) if t is not None]
    shape = Shape(LINEAR, rows, columns, x, tensors, exceeds_int32(*tensors))
    launch = bind(
        _linear_kernel, (shape.programs,), rows, columns, depth, *matrix.stride(), *weight.stride(),
        described=[*shape.operands(matrix, weight), None, *map(shape.result, results)],
        ACTIVATION=activation, HAS_BIAS=bias is not None, SAVE=save_preactivation, **shape.constants,
    )  # fmt: skip
    read_x, read_bias = reader(x, as_matrix), reader(bias, Tensor.contiguous)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *scalars: Any) -> tuple[Tensor, Tensor]:
        y, preactivation = new_y(), new_preactivation()
        launch(read_x(x), weight, read_bias(bias), y, preactivation if save_preactivation else None)
        return y, preactivation

    return run


def plan_gated_linear(
    x: Tensor, weight: Tensor, activation: str, save_preactivation: bool
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """How the gated kernel is launched for tensors of this geometry.

    Args:
        x: `(..., K)`, any strides.
        weight: `(2I, K)` in the dtype of x, any strides: the rows of the gate, then those of what it is multiplied by.
        activation: one of `ACTIVATIONS`.
        save_preactivation: whether the second result is there.

    Returns:
        A function of `(x, weight)` that returns `h` `(..., I)`, and `x @ weight.T` `(..., 2I)`, or `(0,)`; contiguous,
        in the dtype of x.
    """
    columns, depth, rows = weight.shape[0] // 2, weight.shape[1], x.shape[:-1].numel()
    new_h = allocator(x, (*x.shape[:-1], columns))
    new_preactivation = allocator(x, (*x.shape[:-1], 2 * columns), needed=save_preactivation)
    if rows * columns == 0:
        return lambda x, weight: (new_h(), new_preactivation())
    as_matrix = matrix_of(x)
    matrix, weights = as_matrix(x), weight.split(columns)
    saved = unmade((rows, 2 * columns), x.dtype).split(columns, 1) if save_preactivation else (None, None)
    results = [unmade((rows, columns), x.dtype), *saved]
    tensors = [t for t in (matrix, *weights, *results) if t is not None]
    shape = Shape(GATED, rows, columns, x, tensors, exceeds_int32(*tensors))
    launch = bind(
        _gated_linear_kernel, (shape.programs,),
        rows, columns, depth, *matrix.stride(), *weight.stride(), 2 * columns,
        described=[*shape.operands(matrix, *weights), *map(shape.result, results)],
        ACTIVATION=activation, SAVE=save_preactivation, **shape.constants,
    )  # fmt: skip
    read_x = reader(x, as_matrix)

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h, preactivation = new_h(), new_preactivation()
        # The kernel needs only the start addresses of the halves.
        halves = (preactivation, preactivation.narrow(-1, columns, columns)) if save_preactivation else (None, None)
        launch(read_x(x), weight, weight.narrow(0, columns, columns), h, *halves)
        return h, preactivation

    return run


def matrix_of(x: Tensor) -> Callable[[Tensor], Tensor]:
    """What sees tensors like x, `(..., K)`, as `(M, K)`."""
    depth = x.shape[-1]
    return lambda x: x.reshape(-1, depth)
