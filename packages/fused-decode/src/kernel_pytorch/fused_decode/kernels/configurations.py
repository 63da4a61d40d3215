"""Tiles, warps, stages and shares of the kernels: the one place where they are chosen.

Nothing depends on what a cache holds. The number of rows counts only by kernel: 1 and 2 rows take `vector`, more take
`rows`, or `ring` on Hopper in bfloat16, padded to 8 or 16; so the bits of a row do not depend on the others as long as
their number keeps its kernel.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kernel_pytorch.fused_decode._core.sizes import cdiv, next_power_of_2
from kernel_pytorch.fused_decode._core.triton_matmul import architecture, multiprocessors_of


class Vector(NamedTuple):
    """How the product of 1 or 2 rows is launched.

    Attributes:
        columns: of y that a program writes.
        block: elements of K at a time.
        warps: of a program.
    """

    columns: int
    block: int
    warps: int


class Rows(NamedTuple):
    """How the product of 3 to 16 rows is launched where `Ring` is not.

    Attributes:
        columns: of y in a tile.
        block: elements of K at a time.
        warps: of a program.
        stages: tiles of the weight under way.
        splits: shares of K.
        early: whether the first tile is loaded before the wait of programmatic dependent launch.
    """

    columns: int
    block: int
    warps: int
    stages: int
    splits: int
    early: bool


class Ring(NamedTuple):
    """How the product of 3 to 16 rows is launched on Hopper, in bfloat16.

    Attributes:
        columns: of y in a tile.
        block: elements of K at a time.
        stages: blocks of the weight that there is room for.
        splits: shares of K.
        programs: how many walk over the tiles and their shares.
    """

    columns: int
    block: int
    stages: int
    splits: int
    programs: int


class Attention(NamedTuple):
    """How attention is launched.

    Attributes:
        columns: keys at a time.
        warps: of a program.
        stages: tiles of keys and values under way.
        splits: shares of the keys, a power of two.
    """

    columns: int
    warps: int
    stages: int
    splits: int


VECTOR_ROWS = 2  # more are faster on tensor cores
SHARED_MEMORY = 226 * 1024  # of a program on Hopper, at most; 1 KiB is for barriers and sums
MOST_OF_ROW = 4096  # elements of each of 16 rows that a program of `ring_kernel` has room for, beside its blocks
LONGEST_RING = 8 * MOST_OF_ROW
LARGE_SHARED_MEMORY = (90, 100, 103, 110)  # 227 KiB a program


def vector(n: int, k: int, gated: bool, device: torch.device) -> Vector:
    """The configuration of `vector_kernel` for a weight (n, k), or (2 n, k) when gated.

    For most widths of 18 models, of 0.5 to 14 billion weights, within 1 % of the fastest of 18 that were timed for one
    row in a whole step on an H200, and within 5 % for all.
    """
    if architecture(device) is None:
        return Vector(4, min(64, next_power_of_2(k)), 4)
    if gated:
        columns, block, warps = 4, 512, 4 if k > 2048 else 2
    elif k > 8192:
        columns, block, warps = (2, 2048, 4) if n > 2560 else (4, 4096, 8)
    elif k > 2048:
        columns, block, warps = 4, 2048, 4
    else:
        columns, block, warps = (4, 1024, 4) if n > 2048 else (1, 1024, 2)
    block = min(block, next_power_of_2(k))
    while block > 256 and cdiv(k, block) * block > 1.4 * k:  # the last tile would be nearly empty
        block //= 2
    return Vector(columns, block, warps)


def rows(n: int, k: int, gated: bool, itemsize: int, device: torch.device) -> Rows:
    """The configuration of `rows_kernel` for a weight (n, k), or (2 n, k) when gated.

    For widths of Llama 3.2 1B within 1 % of the fastest of 14 to 25 that were timed in a whole step of 8 rows on an
    H200. Where N gives too few tiles, K is split.
    """
    target = architecture(device)
    if target is None:
        return Rows(16, 16, 4, 1, 2 if k > 32 else 1, early=False)
    tiles, splits = cdiv(n, 64), 1
    while tiles * splits < (128 if gated else 256) and splits < 8 and k // (2 * splits) >= 256:
        splits *= 2
    if itemsize == 4:
        return Rows(32 if gated else 64, 32, 4, 2, splits, early=False)
    if target not in LARGE_SHARED_MEMORY:
        return Rows(64, 64, 4, 3, splits, early=False)
    if n >= 12288:
        return Rows(128, 128, 8 if gated else 4, 3, 1, early=True)
    if n > k or gated:
        return Rows(64, 256 if n > k else 128, 4, 3, splits, early=True)
    block = 512 if k < 4096 else 256
    return Rows(64, block, 4, 3 if 4096 < k <= 8192 else 2, min(splits, max(1, k // block)), early=True)


def ring(rows: int, n: int, k: int, gated: bool, device: torch.device) -> Ring:
    """The configuration of `ring_kernel` for 8 or 16 rows and a weight (n, k), or (2 n, k) when gated.

    One program a multiprocessor, with all its memory. The bits of a row depend on blocks and shares, not on the number
    of rows. In steps of 8 rows of the 18 models on an H200, within 6 % of the fastest of 3 to 12, mostly within 1 %.
    """
    columns, most = 64, multiprocessors_of(device)
    splits = ring_shares(cdiv(n, columns), k, gated, most)
    is_even = k <= 2048 and k % (512 * splits) == 0
    block = min(128 if gated else 512 if is_even else 256, max(64, next_power_of_2(k)))
    steps, places = cdiv(k, splits * block), cdiv(n, columns) * splits
    room = SHARED_MEMORY - 2 * rows * steps * block  # x is there too
    stages = min(6, room // (2 * columns * block * (2 if gated else 1)))
    # The same number of tiles for each program, or one less, all in one share of K.
    programs = cdiv(cdiv(places, cdiv(places, most)), splits) * splits
    return Ring(columns, block, min(stages, steps) if places == programs else stages, splits, programs)


@functools.cache
def ring_shares(tiles: int, k: int, gated: bool, programs: int) -> int:
    """How many shares of K take the least time.

    A round of all programs takes as long as its share of K and 256 elements more, and each share costs as much as 256
    elements: fitted to whole steps of 8 rows of the 18 models on an H200.
    """
    width, least = 2 if gated else 1, next_power_of_2(cdiv(k, MOST_OF_ROW))
    return min(
        (s for s in (1, 2, 4, 8) if s == least or (s > least and k >= s * (1280 if gated else 512))),
        key=lambda s: cdiv(tiles * s, programs) * (width * k // s + 256) + (256 * width * s if s > 1 else 0),
    )


def attention(batch: int, kv_heads: int, group: int, head_size: int, capacity: int, itemsize: int,
              device: torch.device) -> Attention:  # fmt: skip
    """The configuration of `attention_kernel`; shares follow from the capacity of the cache.

    In steps on an H200, at 1k of context, within 1 % of the fastest of 8 to 15 for 1 row of the 18 models, and within
    3 % for 8 rows; at 8k within 1 % for Llama 3.2 1B. Programs of one warp need no barriers.
    """
    target = architecture(device)
    if target is None:
        return Attention(16, 4, 1, 2 if capacity > 16 else 1)
    pairs, warps, is_long = batch * kv_heads, 2, capacity > 4096
    is_short = pairs <= 16 and not is_long
    if itemsize == 4:
        columns, stages = 16, 1
    elif head_size > 128:
        columns, stages = 16 if is_short or is_long else 32, 2
    elif target == 90 and is_long and (pairs <= 16 or head_size <= 64):
        columns, warps, stages = 16, 1, 3
    elif head_size > 64:
        columns, stages = (64, 1) if is_short else (32 if is_long else 64, 2)
    elif is_short:
        columns, warps, stages = 64, 1, 1
    else:
        columns, warps, stages = 64 if is_long else 32, 1, 2
    most = 64 if head_size <= 64 or warps == 1 else 32
    wanted = min(most, cdiv(capacity, 64), 8 // warps * multiprocessors_of(device) // pairs)
    return Attention(columns, warps, stages, next_power_of_2(max(1, wanted) + 1) // 2)
