# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""What the matrix kernels share: tiles of `hidden @ weight.T`, read and written through descriptors or pointers.

A descriptor lets the copy engine (TMA) move whole tiles; it needs a base and row strides that are multiples of 16
bytes, and unit stride in the last dimension. Everything else goes through pointers, in the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.linear_cross_entropy._core.device import multiprocessors
from kernel_pytorch.linear_cross_entropy._core.launch import cdiv, exceeds_int32
from kernel_pytorch.linear_cross_entropy._core.launcher import Tiles, tiles

from .configurations import Configuration, Table, configuration
from .tiles import triton_dtype

MULTIPROCESSORS_WITHOUT_GPU = 132  # an H100, where kernels are compiled and not run
INTERPRETED_PROGRAMS = 3  # fewer than tiles, so that programs walk
REGISTERS = 65536  # of a multiprocessor
DESCRIPTORS_FROM = 90  # compute capability of the first copy engine


@triton.jit
def tile_at(index, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """First row and first column of a tile; GROUP rows of tiles are walked together, column after column."""
    width = GROUP * tl.cdiv(columns, COLUMNS)
    first = index // width * GROUP
    height = tl.minimum(tl.cdiv(rows, ROWS) - first, GROUP)
    return (first + index % width % height) * ROWS, index % width // height * COLUMNS


@triton.jit
def load_tile(
    source, row, column, rows, columns, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """A tile of a (rows, columns) matrix, zeros beyond its edges."""
    if DESCRIPTORS:
        return source.load([row, column])
    else:
        r = (row + tl.arange(0, ROWS))[:, None]
        c = (column + tl.arange(0, COLUMNS))[None, :]
        mask = (r < rows) & (c < columns)
        if LONG_OFFSETS:
            r = r.to(tl.int64)
            c = c.to(tl.int64)
        return tl.load(source + r * row_stride + c * column_stride, mask=mask, other=0.0)


@triton.jit
def store_tile(
    target, tile, row, column, rows, columns, row_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Round a tile and write what of it lies in a (rows, columns) matrix of unit stride in its rows."""
    if DESCRIPTORS:
        target.store([row, column], tile.to(target.dtype))
    else:
        r = (row + tl.arange(0, ROWS))[:, None]
        c = (column + tl.arange(0, COLUMNS))[None, :]
        mask = (r < rows) & (c < columns)
        if LONG_OFFSETS:
            r = r.to(tl.int64)
        tl.store(target + r * row_stride + c, tile.to(target.dtype.element_ty), mask=mask)


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile; each thread keeps the elements that it has."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def multiply(
    hidden, weight, row, column, rows, columns, depth,
    hidden_row_stride, hidden_column_stride, weight_row_stride, weight_column_stride,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """A tile of `hidden @ weight.T`."""
    total = tl.zeros((ROWS, COLUMNS), dtype=WIDE)
    for step in range(tl.cdiv(depth, DEPTH)):
        a = load_tile(hidden, row, step * DEPTH, rows, depth, hidden_row_stride, hidden_column_stride, ROWS, DEPTH,
                      DESCRIPTORS, LONG_OFFSETS)  # fmt: skip
        b = load_tile(weight, column, step * DEPTH, columns, depth, weight_row_stride, weight_column_stride, COLUMNS,
                      DEPTH, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip
        total = tl.dot(a, b.T, total, input_precision=PRECISION, out_dtype=WIDE)
    return total


@triton.jit
def add_bias(tile, bias_ptr, column, columns, COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Add the bias of the columns of a tile."""
    if HAS_BIAS:
        place = column + tl.arange(0, COLUMNS)
        bias = tl.load(bias_ptr + place, mask=place < columns, other=0.0)
        tile = tile + bias.to(tile.dtype)[None, :]
    return tile


class Shape:
    """One launch of a matrix kernel: its configuration, and what it says to the kernel.

    Attributes:
        chosen: the configuration.
        constants: keyword arguments of the kernel that all matrix kernels have.
        programs: size of the grid.
    """

    def __init__(self, table: Table, rows: int, columns: int, hidden: Tensor, *others: Tensor) -> None:
        tensors = (hidden, *others)
        precision, exact = precision_of(hidden.dtype)
        aligned, long = all(map(is_describable, tensors)), exceeds_int32(*tensors)
        self.descriptors = copy_engine() and not exact and aligned
        long = long and not self.descriptors
        itemsize = hidden.element_size()
        self.chosen: Configuration = configuration(table, architecture(), itemsize, exact, aligned and not long)
        tiles = cdiv(rows, self.chosen.rows) * cdiv(columns, self.chosen.columns)
        self.programs = min(tiles, program_limit(hidden.device, self.chosen.programs))
        self.constants: dict[str, Any] = {
            "PRECISION": precision, "WIDE": triton_dtype(torch.promote_types(hidden.dtype, torch.float32)),
            "HALF": itemsize == 2, "ROWS": self.chosen.rows, "COLUMNS": self.chosen.columns,
            "DEPTH": self.chosen.depth, "GROUP": self.chosen.group, "DESCRIPTORS": self.descriptors,
            "LONG_OFFSETS": long, "num_stages": self.chosen.stages, "num_warps": self.chosen.warps,
        }  # fmt: skip
        if self.chosen.programs > 1:
            # They are only resident together if their registers are: the compiler does not know that they should be.
            registers = REGISTERS // (self.chosen.programs * self.chosen.warps * 32)
            self.constants["maxnreg"] = min(248, registers // 8 * 8)

    def operands(self, hidden: Tensor, weight: Tensor) -> list[Tiles | None]:
        """How the kernel reads tiles of hidden and weight."""
        if not self.descriptors:
            return [None, None]
        return [
            tiles(hidden, self.chosen.rows, self.chosen.depth),
            tiles(weight, self.chosen.columns, self.chosen.depth),
        ]

    def result(self, matrix: Tensor) -> Tiles | None:
        """How the kernel writes tiles of the shape of the logits, a part at a time."""
        part = self.chosen.rows, self.chosen.columns // self.chosen.parts
        return tiles(matrix, *part) if self.descriptors else None


def matrix_of(x: Tensor) -> Callable[[Tensor], Tensor]:
    """What sees tensors like x, `(..., N)`, as `(T, N)`."""
    columns = x.shape[-1]
    return lambda x: x.reshape(-1, columns)


def precision_of(dtype: torch.dtype) -> tuple[str, bool]:
    """`input_precision` of the products, and whether operands must not be rounded: float32 as torch's switch says."""
    if dtype == torch.float32:
        rounded = torch.backends.cuda.matmul.fp32_precision == "tf32"
        return ("tf32", False) if rounded else ("ieee", True)
    return "ieee", dtype == torch.float64


def is_describable(matrix: Tensor) -> bool:
    """Whether the copy engine can move tiles of a matrix."""
    row_stride, column_stride = matrix.stride()
    aligned = matrix.data_ptr() % 16 == 0 and row_stride * matrix.element_size() % 16 == 0
    return aligned and column_stride == 1 and row_stride >= matrix.shape[1]


def architecture() -> int | None:
    """Compute capability of the current device as Triton writes it; None for the interpreter."""
    if triton.knobs.runtime.interpret:
        return None
    return int(triton.runtime.driver.active.get_current_target().arch)


def copy_engine() -> bool:
    """Whether there is one: the interpreter has one too."""
    found = architecture()
    return found is None or found >= DESCRIPTORS_FROM


def program_limit(device: torch.device, per_multiprocessor: int) -> int:
    """How many programs run at a time."""
    if architecture() is None:
        return INTERPRETED_PROGRAMS
    there = multiprocessors(device) if device.type == "cuda" else MULTIPROCESSORS_WITHOUT_GPU
    return per_multiprocessor * there
