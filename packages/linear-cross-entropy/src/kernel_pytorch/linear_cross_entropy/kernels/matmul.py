# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Tiles of `hidden @ weight.T`, and one launch: its configuration, and what it says to the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.linear_cross_entropy._core.launch import Tiles, tiles
from kernel_pytorch.linear_cross_entropy._core.sizes import cdiv, exceeds_int32
from kernel_pytorch.linear_cross_entropy._core.triton_matmul import (
    architecture,
    copy_engine,
    is_describable,
    load_tile,
    most_registers,
    precision_of,
    program_limit,
)

from .configurations import Configuration, Table, configuration
from .tiles import triton_dtype


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
        self.descriptors = copy_engine(hidden.device) and not exact and aligned
        long = long and not self.descriptors
        itemsize = hidden.element_size()
        self.chosen: Configuration = configuration(
            table, architecture(hidden.device), itemsize, exact, aligned and not long
        )
        tiles = cdiv(rows, self.chosen.rows) * cdiv(columns, self.chosen.columns)
        self.programs = min(tiles, program_limit(hidden.device, self.chosen.programs))
        self.constants: dict[str, Any] = {
            "PRECISION": precision, "WIDE": triton_dtype(torch.promote_types(hidden.dtype, torch.float32)),
            "HALF": itemsize == 2, "ROWS": self.chosen.rows, "COLUMNS": self.chosen.columns,
            "DEPTH": self.chosen.depth, "GROUP": self.chosen.group, "DESCRIPTORS": self.descriptors,
            "LONG_OFFSETS": long, "num_stages": self.chosen.stages, "num_warps": self.chosen.warps,
            **most_registers(self.chosen.programs, self.chosen.warps),
        }  # fmt: skip

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
