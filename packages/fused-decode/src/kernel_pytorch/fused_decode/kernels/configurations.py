"""Tiles, warps, stages and shares of the kernels: the one place where they are chosen.

Nothing depends on what a cache holds. The number of rows counts only by kernel: one row takes `vector`, more take
`rows`, padded to 8 or 16; so the bits of a row do not depend on the others as long as their number stays in its class.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernel_pytorch.fused_decode._core.device import compute_capability, multiprocessors
from kernel_pytorch.fused_decode._core.launch import cdiv, next_power_of_2


class Vector(NamedTuple):
    """How the product of one row is launched.

    Attributes:
        columns: of y that a program writes.
        block: elements of K at a time.
        warps: of a program.
    """

    columns: int
    block: int
    warps: int


class Rows(NamedTuple):
    """How the product of 2 to 16 rows is launched.

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


def architecture(device: torch.device) -> int | None:
    """Compute capability of a GPU as Triton writes it; None for the interpreter."""
    if device.type != "cuda":
        return None
    major, minor = compute_capability(device)
    return 10 * major + minor


def vector(n: int, k: int, gated: bool, itemsize: int, device: torch.device) -> Vector:
    """The configuration of `vector_kernel` for a weight (n, k), or (2 n, k) when gated."""
    if architecture(device) is None:
        return Vector(4, min(64, next_power_of_2(k)), 4)
    if gated:
        return Vector(1, min(1024, next_power_of_2(k)), 8 if k >= 2048 else 4)
    block = min(2048 if k % 2048 == 0 and n > k else 1024, next_power_of_2(k))
    columns = 1 if n <= 2048 else 2 if n < 32768 else 4
    return Vector(columns, block, 8 if columns * block >= 8192 else 4)


def rows(n: int, k: int, gated: bool, itemsize: int, device: torch.device) -> Rows:
    """The configuration of `rows_kernel` for a weight (n, k), or (2 n, k) when gated."""
    if architecture(device) is None:
        return Rows(16, 16, 4, 1, 2 if k > 32 else 1, early=False)
    if itemsize == 4:
        return Rows(32, 32, 4, 2, max(1, min(8, cdiv(k, 512))), early=False)
    # Enough tiles to fill the chip: a tile of 64 rows of the weight, and K split where N alone gives too few.
    tiles = cdiv(n, 64)
    wanted = 2 * multiprocessors(device)
    splits = 1
    while tiles * splits < wanted and splits < 8 and k // (2 * splits) >= 512:
        splits *= 2
    if n >= 32768:
        return Rows(128, 128, 4, 3, 1, early=False)
    return Rows(64, 128, 4, 3 if gated else 4, splits, early=False)


def attention(batch: int, kv_heads: int, group: int, head_size: int, capacity: int, itemsize: int,
              device: torch.device) -> Attention:  # fmt: skip
    """The configuration of `attention_kernel`; shares fill the chip once, however long the sequences are."""
    if architecture(device) is None:
        return Attention(16, 4, 1, 2 if capacity > 16 else 1)
    columns = 32 if itemsize == 2 and head_size <= 128 else 16
    most = next_power_of_2(cdiv(capacity, columns))
    wanted = max(1, multiprocessors(device) // (batch * kv_heads))
    splits = min(64, most, next_power_of_2(wanted))
    return Attention(columns, 4, 3 if itemsize == 2 else 1, splits)
