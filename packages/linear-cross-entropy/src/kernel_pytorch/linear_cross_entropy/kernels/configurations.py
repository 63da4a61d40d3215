"""Shapes of the matrix kernels, by architecture: the one place where tiles, stages and warps are chosen.

Nothing is tuned at a user's call, and nothing depends on how many tokens there are: the widths of the tiles decide in
which order exponentials are added, and so about the bits of a loss. A few tokens fill a GPU all the same, since a large
vocabulary has hundreds of tiles, and then it is the reading of the weight that takes the time.
"""

from __future__ import annotations

from typing import NamedTuple


class Configuration(NamedTuple):
    """How a matrix kernel is launched.

    Attributes:
        rows: tokens of a tile of logits.
        columns: words of a tile of logits.
        depth: columns of hidden and weight that are copied at once.
        stages: copies under way, the one that is computed included.
        warps: of a program.
        parts: in how many parts, side by side, the epilogue takes a tile: fewer registers, less shared memory.
        programs: on a multiprocessor at a time; with two, the epilogue of one overlaps the products of the other.
        group: rows of tiles that are walked together, so that the weights they share stay in the L2 cache.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    parts: int = 1
    programs: int = 1
    group: int = 16


class Table(NamedTuple):
    """The configurations of one kernel.

    Attributes:
        tensor_cores: by architecture.
        exact: by bytes of an element, for operands that tensor cores would round, or have no instruction for.
    """

    tensor_cores: dict[int, Configuration]
    exact: dict[int, Configuration]


# For 16-bit operands; float32 rounded to tf32 takes half the depth, which is as many bytes. Those of sm_90 are taken
# over from the linear layer with an epilogue of fused-ln-act, where they were measured on an H200; the others follow
# from their shared memory: 163 KiB on sm_80, 227 KiB on sm_90 and sm_100, 99 KiB on sm_120.
EXACT = {4: Configuration(64, 64, 32, 2, 4), 8: Configuration(32, 32, 16, 2, 4)}
FORWARD = Table(
    {
        80: Configuration(128, 128, 64, 3, 8, parts=2),
        90: Configuration(128, 128, 64, 3, 8, parts=4, programs=2),
        100: Configuration(128, 128, 64, 4, 8, parts=2),
        120: Configuration(128, 128, 32, 3, 8, parts=2),
    },
    EXACT,
)
GRADIENT = Table(
    {
        80: Configuration(128, 128, 64, 3, 8, parts=2),
        90: Configuration(128, 128, 64, 3, 8, parts=2, programs=2),
        100: Configuration(128, 128, 64, 3, 8, parts=2),
        120: Configuration(128, 128, 32, 3, 8, parts=2),
    },
    EXACT,
)
# Operands that are read two bytes at a time, with one address per element, leave few registers.
IRREGULAR = Configuration(64, 64, 32, 2, 8)
# The interpreter takes whole tiles and runs programs one after the other: small ones, several for each program.
INTERPRETED = Configuration(32, 32, 32, 2, 4, parts=2)


def configuration(table: Table, architecture: int | None, itemsize: int, exact: bool, regular: bool) -> Configuration:
    """The shape of one launch.

    Args:
        table: of the kernel.
        architecture: compute capability as Triton writes it (90 is 9.0); None for the interpreter. One that is not in
            the table takes the entry of another with as much shared memory.
        itemsize: bytes of an element of hidden and weight.
        exact: whether tensor cores must not round operands: float32 without tf32, float64.
        regular: whether operands can be read 16 bytes at a time.
    """
    if architecture is None:
        return INTERPRETED
    if exact:
        return table.exact[itemsize]
    chosen = table.tensor_cores[_of_equal_memory(architecture)] if regular else IRREGULAR
    return chosen._replace(depth=chosen.depth * 2 // itemsize)


def _of_equal_memory(architecture: int) -> int:
    # 8.6 and 8.9 have 99 KiB of shared memory, as 12.x has; what runs there is mma.sync in all of them.
    known = {80: 80, 87: 80, 90: 90, 100: 100, 103: 100, 110: 100}
    return known.get(architecture, 120)
