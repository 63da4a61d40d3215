"""What the row kernels of all groups share: shapes of launches, by architecture, and sums over rows of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.device import program_count, shared_memory
from kernel_pytorch.fused_ln_act._core.launch import bind
from kernel_pytorch.fused_ln_act._core.sizes import allocator, cdiv, next_power_of_2, warps

LONG_BLOCK = 4096  # columns of one block of a row that is walked
LONG_WARPS = 16  # 8 elements a thread: statistics, masks and derivatives of 16 would not fit in its registers
# Bytes of the principal input in a tile of whole rows: two of them, within these bounds. Smaller ones leave the copies
# into shared memory too short, larger ones leave too few to be in flight at once.
SMALLEST_TILE, LARGEST_TILE = 2048, 16384
LARGEST_ACTIVATED_TILE = 4096
# Warps of a multiprocessor that are resident at once if each holds 1 KiB of a tile: 16 elements a thread and an
# activation take 160 registers, which leaves no room for more.
ACTIVATED_WARPS = 12
BYTES_OF_WARP = 512  # that it loads in one access: 16 for each of its threads
ELEMENTS_AT_ONCE = 8  # of a thread, up to which a row alone is not copied ahead
STAGES = 3  # tiles under way: one is computed, two are copied
REGISTERS, MOST_REGISTERS = 65536, 255  # of a multiprocessor, of a thread
LONG_PROGRAMS_PER_MULTIPROCESSOR = 4


@triton.jit
def divide(x, y):
    """`x / y` rounded to nearest; Triton's own division of float32 may be off by two units in the last place."""
    if x.dtype == tl.float32:
        return tl.div_rn(x, tl.cast(y, tl.float32))  # y may be the constant 1
    else:
        return x / y


@triton.jit
def product(x, y):
    """`x * y`, rounded before it is added to anything.

    When two products are added, the compiler fuses one of them with the addition. Which one may depend on the number of
    rows of a program, so the last bit of a row's sum would depend on the number of rows.
    """
    return tl.fma(x, y, tl.zeros_like(x))


@triton.jit
def _add_shares_kernel(
    shares_ptr, first_ptr, second_ptr, programs, columns,
    HAS_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This program adds the shares of BLOCK elements of one parameter's gradient, always in the same order.

    shares: (1 or 2, P, N). first, second: (N), the gradients; with one kind of shares it goes to `first` if HAS_FIRST,
    else to `second`.
    """
    kind = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], dtype=shares_ptr.dtype.element_ty)
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)[:, None]
        mask = (program < programs) & (column < columns)
        total += tl.load(shares_ptr + (kind * programs + program) * columns + column, mask=mask, other=0.0)
    column_out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gradient = tl.sum(total, axis=0)
    if HAS_FIRST:
        if kind == 0:
            tl.store(first_ptr + column_out, gradient.to(first_ptr.dtype.element_ty), mask=column_out < columns)
        else:
            tl.store(second_ptr + column_out, gradient.to(second_ptr.dtype.element_ty), mask=column_out < columns)
    else:
        tl.store(second_ptr + column_out, gradient.to(second_ptr.dtype.element_ty), mask=column_out < columns)


class Sums:
    """Sums over rows that are the gradients of one or two parameters: a share for each program, and their addition."""

    def __init__(self, programs: int, columns: int, needs: tuple[bool, bool], like: Tensor, dtype: torch.dtype) -> None:
        self.needs = needs
        self._new_shares = allocator(like, (sum(needs), programs, columns), dtype)
        rows = min(256, next_power_of_2(programs))
        block = 4096 // rows
        self._add = bind(
            _add_shares_kernel, (cdiv(columns, block), sum(needs)), programs, columns,
            HAS_FIRST=needs[0], ROWS=rows, BLOCK=block, num_warps=8,
        )  # fmt: skip

    def shares(self) -> tuple[Tensor, Tensor]:
        """Memory for the shares of the first, and where those of the second begin; if one is needed, its own twice."""
        shares = self._new_shares()
        return shares, shares[1] if all(self.needs) else shares

    def add(self, shares: Tensor, first: Tensor, second: Tensor) -> None:
        """Add what `shares()` returned first into the gradients, `(N,)`, that are needed: one launch."""
        self._add(shares, first if self.needs[0] else second, second if self.needs[1] else first)


def as_rows(x: Tensor) -> Tensor:
    """View `x` as `(T, N)` with unit stride in N; copies only what has no such view."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def are_half(*tensors: Tensor | None) -> bool:
    """Whether all of these that are there have 16 bits, so that what is computed for them is rounded to as many."""
    return all(tensor is None or tensor.element_size() == 2 for tensor in tensors)


class Walk(NamedTuple):
    """How persistent programs walk the rows.

    Attributes:
        rows: of a tile.
        block: columns of a tile.
        warps: of a program.
        programs: on one multiprocessor at once.
        stages: tiles under way in a program.
    """

    rows: int
    block: int
    warps: int
    programs: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """Constants of the kernel, and options of the compiler with which that many programs fit at once.

        It does not know that they should: with a register too many the last of them starts when the first has finished.
        """
        options = {"ROWS": self.rows, "BLOCK": self.block, "STAGES": self.stages, "num_warps": self.warps}
        registers = REGISTERS // (self.programs * self.warps * 32) // 8 * 8
        return options if registers >= MOST_REGISTERS else options | {"maxnreg": registers}


def are_shared_alike(block: int, num_warps: int, views: Sequence[Tensor], parameters: Sequence[Tensor | None]) -> bool:
    """Whether a program of one row sums it up in the same order as a program of several.

    It does if all warps share a row in both cases and each thread has the same number of adjacent columns. The compiler
    chooses the number that fills the widest access to any tensor of that shape. With one row, the parameters have its
    shape too: all tensors must have elements of one size, and tensors read by rows must be aligned as parameters are.

    Args:
        block: columns of a program.
        num_warps: of a program.
        views: `(T, N)`, what is read by rows.
        parameters: `(N,)` or None.
    """
    sizes = {tensor.element_size() for tensor in (*views, *parameters) if tensor is not None}
    aligned = all(v.shape[-1] % 16 == 0 and v.stride(0) % 16 == 0 and v.data_ptr() % 16 == 0 for v in views)
    return len(sizes) == 1 and aligned and block * views[0].element_size() >= num_warps * BYTES_OF_WARP


def walk(views: Sequence[Tensor], parameters: Sequence[Tensor | None], activated: bool) -> Walk:
    """How programs walk whole rows.

    Args:
        views: `(T, N)`, what is copied, first that of the principal dtype.
        parameters: `(N,)` or None.
        activated: whether there is an activation.
    """
    h, tensors = views[0], len(views)
    total, columns = h.shape
    block = next_power_of_2(columns)
    row_bytes = block * h.element_size()
    largest = LARGEST_ACTIVATED_TILE if activated else LARGEST_TILE
    rows = max(1, min(max(2 * row_bytes, SMALLEST_TILE), largest) // row_bytes)
    # With 16 elements of a longer row a thread would need more registers for an activation than there are.
    num_warps = warps(rows * block, 8 if activated and row_bytes > largest else 16)
    programs = LARGEST_TILE // (rows * row_bytes)
    if activated:
        programs = min(programs, ACTIVATED_WARPS // num_warps)
    programs = max(1, programs)
    # With few rows, each row gets its own program, which has nothing to prefetch. With more elements per thread, a
    # program waits less for copies than for registers.
    few = total <= program_count(h.device, programs) and are_shared_alike(block, num_warps, views, parameters)
    if few and block <= 32 * num_warps * ELEMENTS_AT_ONCE:
        return Walk(1, block, num_warps, programs, 1)
    return Walk(rows, block, num_warps, programs, stages(programs * tensors * rows * row_bytes, h.device))


def stages(bytes_in_tiles: int, device: torch.device) -> int:
    """Number of tiles in flight at once: the one being computed, plus those that fit in shared memory.

    Args:
        bytes_in_tiles: of one tile of every tensor that is copied, times the programs of a multiprocessor.
        device: the current one.
    """
    # Beside the tiles it holds what the reduction exchanges.
    return max(1, min(STAGES, 1 + (shared_memory(device) - 4096) // bytes_in_tiles))
