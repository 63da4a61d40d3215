"""Tiles, warps and stages of the kernels by architecture and head size: the one place where they are chosen.

Nothing is tuned at a user's call, and nothing depends on how long sequences are or how many there are, so the bits of a
row do not either. Those of sm_90 are the fastest of those that were timed on an H200; the others follow from registers
and shared memory (163 KiB on sm_80, 227 KiB on sm_90 and sm_100, 99 KiB elsewhere). All compile without spills beyond
what the contracts allow.
"""

from __future__ import annotations

from typing import NamedTuple


class Configuration(NamedTuple):
    """How a kernel is launched.

    Attributes:
        rows: queries of a tile.
        columns: keys of a tile.
        warps: of a program.
        stages: tiles under way, the one that is computed included.
    """

    rows: int
    columns: int
    warps: int
    stages: int


class Table(NamedTuple):
    """The configurations of one kernel, by the largest padded head size that they are for.

    Attributes:
        half: for 16-bit tensors, by architecture.
        busy: on every architecture, where something else takes registers too: a bias or dropout, or a head size that is
            no multiple of 16, so that every element needs a separate address.
        small: on every architecture, for float32 and where both of these take registers.
    """

    half: dict[int, dict[int, Configuration]]
    busy: dict[int, Configuration]
    small: dict[int, Configuration]


SMALL = {64: Configuration(32, 32, 8, 1), 128: Configuration(32, 32, 8, 1), 256: Configuration(16, 16, 8, 1)}
FORWARD = Table(
    {
        80: {64: Configuration(128, 64, 4, 3), 128: Configuration(128, 64, 8, 3), 256: Configuration(64, 32, 8, 2)},
        90: {64: Configuration(64, 64, 4, 3), 128: Configuration(64, 64, 4, 3), 256: Configuration(64, 32, 4, 2)},
        100: {64: Configuration(128, 64, 4, 3), 128: Configuration(128, 64, 8, 3), 256: Configuration(64, 32, 8, 2)},
        120: {64: Configuration(128, 64, 4, 2), 128: Configuration(128, 32, 8, 2), 256: Configuration(64, 32, 8, 1)},
    },
    {64: Configuration(64, 64, 8, 2), 128: Configuration(64, 64, 8, 2), 256: Configuration(64, 32, 8, 1)},
    SMALL,
)
# Both keys and values, and both of their gradients, are in registers.
KEYS = Table(
    {
        80: {64: Configuration(32, 64, 8, 2), 128: Configuration(32, 64, 8, 2), 256: Configuration(32, 32, 8, 1)},
        90: {64: Configuration(64, 128, 8, 3), 128: Configuration(64, 128, 8, 3), 256: Configuration(32, 64, 8, 2)},
        100: {64: Configuration(32, 64, 8, 2), 128: Configuration(32, 32, 8, 1), 256: Configuration(32, 32, 8, 1)},
        120: {64: Configuration(32, 64, 8, 2), 128: Configuration(32, 64, 8, 1), 256: Configuration(32, 32, 8, 1)},
    },
    {64: Configuration(16, 64, 4, 1), 128: Configuration(32, 32, 8, 1), 256: Configuration(16, 32, 8, 1)},
    {64: Configuration(16, 32, 8, 1), 128: Configuration(16, 32, 8, 1), 256: Configuration(16, 16, 8, 1)},
)
QUERIES = Table(
    {
        80: {64: Configuration(64, 64, 4, 2), 128: Configuration(64, 32, 8, 2), 256: Configuration(32, 32, 8, 1)},
        90: {64: Configuration(64, 64, 4, 3), 128: Configuration(128, 64, 8, 3), 256: Configuration(128, 32, 8, 2)},
        100: {64: Configuration(64, 64, 4, 2), 128: Configuration(64, 32, 8, 2), 256: Configuration(32, 32, 8, 1)},
        120: {64: Configuration(64, 64, 4, 2), 128: Configuration(64, 32, 8, 1), 256: Configuration(32, 32, 8, 1)},
    },
    {64: Configuration(64, 32, 4, 1), 128: Configuration(32, 32, 8, 1), 256: Configuration(32, 32, 8, 1)},
    SMALL,
)
# Rows are the query heads of one KV head: this is the maximum, since fewer are padded to 16. Speed depends on the bytes
# of the cache in flight. None of these configurations was timed yet.
_DECODE = {64: Configuration(64, 64, 4, 4), 128: Configuration(64, 64, 4, 3), 256: Configuration(64, 32, 8, 3)}
DECODE = Table(
    {
        80: _DECODE,
        90: _DECODE,
        100: _DECODE,
        120: {64: Configuration(64, 64, 4, 3), 128: Configuration(64, 32, 4, 3), 256: Configuration(64, 32, 8, 2)},
    },
    {64: Configuration(64, 64, 8, 2), 128: Configuration(64, 64, 8, 2), 256: Configuration(64, 32, 8, 1)},
    {64: Configuration(32, 32, 8, 1), 128: Configuration(16, 32, 8, 1), 256: Configuration(16, 16, 8, 1)},
)
INTERPRETED = Configuration(64, 64, 4, 1)
"""The interpreter takes whole tiles, one after the other: a test has several of them."""


def configuration(table: Table, architecture: int | None, depth: int, itemsize: int, is_busy: bool) -> Configuration:
    """The configuration of a kernel.

    Args:
        table: of the kernel.
        architecture: compute capability as Triton writes it (90 is 9.0); None for the interpreter. One that is not in
            the table takes the entry of another with as much shared memory.
        depth: the head size.
        itemsize: bytes of an element.
        is_busy: whether there is a bias or dropout.
    """
    if architecture is None:
        return INTERPRETED
    unaligned = depth % 16 != 0
    if itemsize == 4 or (is_busy and unaligned):
        of_depth = table.small
    elif is_busy or unaligned:
        of_depth = table.busy
    else:
        of_depth = table.half[_of_equal_memory(architecture)]
    return of_depth[min(largest for largest in of_depth if largest >= depth)]


def _of_equal_memory(architecture: int) -> int:
    # 8.6 and 8.9 have 99 KiB of shared memory, as 12.x has; what runs there is mma.sync in all of them.
    known = {80: 80, 87: 80, 90: 90, 100: 100, 103: 100, 110: 100}
    return known.get(architecture, 120)
