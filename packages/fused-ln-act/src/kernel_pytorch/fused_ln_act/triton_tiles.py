# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""What the elementwise kernels share: tiles of some rows and some columns, where no sum runs over a row."""

from __future__ import annotations

import triton
import triton.language as tl

TILE = 2048  # elements
NARROWEST = 256  # columns: 512 bytes of a 16-bit dtype, four memory transactions


@triton.jit
def place(pid, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr):
    """Rows `(ROWS, 1)` and columns `(1, BLOCK)` of a tile, and which of them exist; neighbours lie in one row."""
    blocks = tl.cdiv(columns, BLOCK)
    row = (pid // blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    if LONG_OFFSETS:
        row = row.to(tl.int64)
    column = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < rows) & (column < columns)


def tile_shape(columns: int) -> tuple[int, int]:
    """Rows and columns of a tile: of the powers of two that leave the fewest lanes without a column, the widest."""
    widest = min(TILE, triton.next_power_of_2(columns))
    widths = [1 << power for power in range(min(NARROWEST, widest).bit_length() - 1, widest.bit_length())]
    block = min(widths, key=lambda width: (triton.cdiv(columns, width) * width, -width))
    return TILE // block, block


def tile_count(rows: int, columns: int, shape: tuple[int, int]) -> int:
    """How many tiles of this shape cover the rows."""
    return triton.cdiv(rows, shape[0]) * triton.cdiv(columns, shape[1])
