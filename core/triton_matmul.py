# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""What matrix kernels in Triton share: tiles of a product, read and written through descriptors or pointers.

A descriptor lets the copy engine (TMA) move whole tiles; it needs a base and row strides that are multiples of 16
bytes, and unit stride in the last dimension. Everything else goes through pointers, in the same kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import multiprocessors

INTERPRETED_PROGRAMS = 3  # fewer than tiles, so that programs walk
REGISTERS = 65536  # of a multiprocessor
DESCRIPTORS_FROM = 90  # compute capability of the first copy engine
MULTIPROCESSORS_WITHOUT_GPU = 132  # an H100, where kernels are compiled and not run


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


def rounding(x: Tensor, *arguments: Any) -> Any:
    """What plans rest on beside their arguments: whether torch's switch lets tensor cores round float32."""
    return x.dtype == torch.float32 and precision_of(x.dtype)


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


def architecture(device: torch.device) -> int | None:
    """Compute capability of a device, which is the current one, as Triton writes it; None for the interpreter."""
    return None if triton.knobs.runtime.interpret else _architecture(device)


@functools.lru_cache
def _architecture(device: torch.device) -> int:
    return int(triton.runtime.driver.active.get_current_target().arch)


def copy_engine(device: torch.device) -> bool:
    """Whether there is one: the interpreter has one too."""
    found = architecture(device)
    return found is None or found >= DESCRIPTORS_FROM


def program_limit(device: torch.device, per_multiprocessor: int) -> int:
    """Number of programs that run at a time."""
    interpreted = triton.knobs.runtime.interpret
    return INTERPRETED_PROGRAMS if interpreted else per_multiprocessor * multiprocessors_of(device)


def multiprocessors_of(device: torch.device) -> int:
    """Number of multiprocessors of the GPU; without one, of the GPU that kernels are compiled for."""
    return multiprocessors(device) if device.type == "cuda" else MULTIPROCESSORS_WITHOUT_GPU


def most_registers(programs: int, warps: int) -> dict[str, int]:
    """Compiler option that keeps this many programs resident on a multiprocessor; the compiler does not know it."""
    return {"maxnreg": min(248, REGISTERS // (programs * warps * 32) // 8 * 8)} if programs > 1 else {}
