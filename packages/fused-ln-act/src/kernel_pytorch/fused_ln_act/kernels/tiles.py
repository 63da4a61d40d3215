"""What the elementwise kernels share: tiles of some rows and some columns, where no sum runs over a row."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kernel_pytorch.fused_ln_act._core.sizes import cdiv, next_power_of_2

NARROWEST = 256  # columns: 512 bytes of a 16-bit dtype, four memory transactions
FEW_ELEMENTS = 2**20  # an H200 takes longer to launch and wait than to move these
FEW_ROWS = 512  # that one program sums up
FEW_TILE, FEW_COLUMNS, FEW_WARPS = 4096, 16, 8  # elements of its tile, with at least FEW_COLUMNS columns
MOST_IN_GRID = 65535  # programs, along its second and third axis


@triton.jit
def place(rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr):
    """Rows `(ROWS, 1)` and columns `(1, BLOCK)` of this program's tile, and which of them exist."""
    tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    if LONG_OFFSETS:
        tile = tile.to(tl.int64)
    row = tile * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < rows) & (column < columns)


class Tile(NamedTuple):
    """What one program computes, and with how many warps."""

    rows: int
    block: int
    warps: int

    @property
    def options(self) -> dict[str, int]:
        """Constants of the kernel and options of the compiler."""
        return {"ROWS": self.rows, "BLOCK": self.block, "num_warps": self.warps}

    def grid(self, rows: int, columns: int) -> tuple[int, int, int]:
        """How many of these cover the rows; neighbours lie in one row. The second and third axis count along rows."""
        tiles = cdiv(rows, self.rows)
        layers = cdiv(tiles, MOST_IN_GRID)
        return cdiv(columns, self.block), cdiv(tiles, layers), layers


def widest_tile(columns: int, elements: int, warps: int, widest: int | None = None) -> Tile:
    """The widest tile of `elements` elements among the powers of two that leave the fewest lanes without a column.

    Args:
        columns: of a row.
        elements: of the tile, a power of two.
        warps: of a program.
        widest: no more columns than these; None for those of the whole tile.
    """
    widest = min(widest or elements, next_power_of_2(columns))
    widths = [1 << power for power in range(min(NARROWEST, widest).bit_length() - 1, widest.bit_length())]
    block = min(widths, key=lambda width: (cdiv(columns, width) * width, -width))
    return Tile(elements // block, block, warps)


def tile_of_few(rows: int, columns: int, widest: int) -> Tile | None:
    """The tile with which one program takes all rows, so that a sum over them is no share; None where that is slow.

    Args:
        rows: of the tensor.
        columns: of the tensor.
        widest: columns of a tile at most.
    """
    if rows > FEW_ROWS or rows * columns > FEW_ELEMENTS:
        return None
    tile_rows = next_power_of_2(rows)
    return Tile(tile_rows, max(FEW_COLUMNS, min(widest, FEW_TILE // tile_rows)), FEW_WARPS)
