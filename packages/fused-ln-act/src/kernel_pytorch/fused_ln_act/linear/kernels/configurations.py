"""Shapes of the matrix kernels, by architecture: the one place where tiles, stages and warps are chosen.

Nothing is tuned at a user's call. All multiprocessors begin a tile and end it together, a wave, and the last wave is
rarely full: of the tiles in a table those are taken whose waves take the least time. Every entry walks K in steps of 16
columns, one after the other, so the choice decides about time and never about the result of a row.
"""

from __future__ import annotations

from typing import NamedTuple


class Configuration(NamedTuple):
    """How a matrix kernel is launched.

    Attributes:
        rows: of a tile of the result.
        columns: of a tile of the result; a gated kernel computes one of the gate and one of the other half.
        depth: columns of x and weight that are copied at once.
        stages: copies under way, the one that is computed included.
        warps: of a program.
        parts: in how many parts, side by side, the epilogue takes a tile: fewer registers, less shared memory.
        programs: on a multiprocessor at a time; with two, the epilogue of one overlaps the products of the other.
        flatten: whether the copies for the next tile start before the epilogue of this one.
        group: rows of tiles that are walked together, so that the weights they share stay in the L2 cache.
        speed: of the elements of full waves, as a share of what the table's first tiles reach.
        overhead: of a wave, before and behind the products, where nothing hides it: in columns of x.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    parts: int = 1
    programs: int = 1
    flatten: bool = False
    group: int = 8
    speed: float = 1.0
    overhead: int = 0

    def time(self, rows: int, columns: int, depth: int, multiprocessors: int) -> float:
        """Estimated time of all waves of `(rows, depth) @ (depth, columns)`, in arbitrary units."""
        tiles = -(-rows // self.rows) * -(-columns // self.columns)
        waves = -(-tiles // (multiprocessors * self.programs))
        return waves * self.programs * self.rows * self.columns * (depth / self.speed + self.overhead)


class Table(NamedTuple):
    """The configurations of one kernel.

    Attributes:
        tensor_cores: by architecture.
        exact: by bytes of an element, for operands that tensor cores would round, or have no instruction for.
    """

    tensor_cores: dict[int, tuple[Configuration, ...]]
    exact: dict[int, Configuration]


# For 16-bit operands; float32 rounded to tf32 takes half the depth, which is as many bytes. Measured on an H200, speeds
# too, those of few rows by what reading the weights leaves of them; the others follow from their shared memory (163 KiB
# on sm_80, 227 KiB on sm_90 and sm_100, 99 KiB on sm_120), and speeds from the operations that a tile does with a byte.
LINEAR = Table(
    {
        80: (Configuration(128, 128, 64, 3, 8), Configuration(64, 64, 64, 4, 4, speed=0.55)),
        90: (
            Configuration(128, 256, 64, 4, 8, parts=4, flatten=True, overhead=110),
            Configuration(128, 128, 64, 3, 8, parts=2, programs=2, speed=0.97),
            Configuration(128, 128, 64, 4, 8, speed=0.66),
            Configuration(64, 128, 128, 4, 4, speed=0.53),
            Configuration(64, 64, 128, 4, 4, speed=0.36),
            Configuration(64, 32, 256, 4, 4, speed=0.3),
            Configuration(16, 64, 128, 4, 2, programs=2, speed=0.3),
            Configuration(16, 32, 128, 8, 2, programs=2, speed=0.175, overhead=1000),
            Configuration(16, 32, 256, 4, 2, programs=2, speed=0.17),
        ),
        100: (Configuration(128, 128, 64, 4, 8), Configuration(64, 64, 64, 4, 4, speed=0.55)),
        120: (Configuration(128, 128, 32, 3, 8, parts=2), Configuration(64, 64, 32, 4, 4, speed=0.55)),
    },
    {4: Configuration(64, 64, 32, 2, 4), 8: Configuration(32, 32, 16, 2, 4)},
)
LINEAR_BACKWARD = Table(
    {
        80: (Configuration(128, 128, 64, 3, 8, parts=2), Configuration(64, 64, 64, 3, 4, speed=0.55)),
        90: (Configuration(128, 128, 64, 3, 8, parts=2, programs=2), Configuration(64, 64, 64, 3, 4, speed=0.55)),
        100: (Configuration(128, 128, 64, 3, 8, parts=2), Configuration(64, 64, 64, 3, 4, speed=0.55)),
        120: (Configuration(128, 128, 32, 3, 8, parts=2), Configuration(64, 64, 32, 3, 4, speed=0.55)),
    },
    {4: Configuration(64, 64, 32, 2, 4), 8: Configuration(32, 32, 16, 2, 4)},
)
GATED = Table(
    {
        80: (Configuration(128, 64, 64, 3, 8), Configuration(64, 64, 64, 3, 8, speed=0.7)),
        90: (
            Configuration(128, 64, 64, 3, 8, programs=2),
            Configuration(64, 64, 64, 4, 4, programs=2, speed=0.87),
            Configuration(64, 32, 128, 3, 4, programs=2, speed=0.62),
            Configuration(64, 32, 256, 3, 4, speed=0.44),
            Configuration(16, 64, 128, 3, 2, programs=2, speed=0.33),
            Configuration(16, 32, 256, 3, 2, speed=0.2),
        ),
        100: (Configuration(128, 128, 64, 3, 8), Configuration(64, 64, 64, 3, 4, speed=0.7)),
        120: (Configuration(128, 64, 32, 3, 8, parts=2), Configuration(64, 64, 32, 3, 4, speed=0.7)),
    },
    {4: Configuration(64, 64, 32, 2, 8), 8: Configuration(32, 32, 16, 2, 8)},
)
GATED_BACKWARD = Table(
    {
        80: (Configuration(128, 64, 64, 3, 8), Configuration(64, 64, 32, 3, 8, speed=0.7)),
        90: (
            Configuration(128, 64, 64, 3, 8, parts=2, programs=2),
            Configuration(64, 64, 64, 3, 4, speed=0.7),
        ),
        100: (Configuration(128, 64, 64, 3, 8), Configuration(64, 64, 64, 3, 4, speed=0.7)),
        120: (Configuration(128, 64, 32, 3, 8, parts=2), Configuration(64, 64, 32, 3, 4, speed=0.7)),
    },
    {4: Configuration(64, 64, 32, 2, 8), 8: Configuration(32, 32, 16, 2, 4)},
)
# Operands that are read two bytes at a time, with a separate address for each read, leave few registers.
IRREGULAR = Configuration(64, 64, 32, 2, 8)
# The interpreter takes whole tiles and runs programs one after the other: small ones, several for each program.
INTERPRETED = Configuration(32, 32, 32, 2, 4, parts=2)


def configuration(
    table: Table,
    architecture: int | None,
    multiprocessors: int,
    rows: int,
    columns: int,
    depth: int,
    itemsize: int,
    exact: bool,
    regular: bool,
) -> Configuration:
    """The shape of one launch.

    Args:
        table: of the kernel.
        architecture: compute capability as Triton writes it (90 is 9.0); None for the interpreter. One that is not in
            the table takes the entry of another with as much shared memory.
        multiprocessors: of the device.
        rows: of the result.
        columns: of the result.
        depth: columns of x.
        itemsize: bytes of an element of x and weight.
        exact: whether tensor cores must not round operands: float32 without tf32, float64.
        regular: whether operands can be read 16 bytes at a time.
    """
    if architecture is None:
        return INTERPRETED
    if exact:
        return table.exact[itemsize]
    if not regular:
        return IRREGULAR._replace(depth=IRREGULAR.depth * 2 // itemsize)
    candidates = table.tensor_cores[_of_equal_memory(architecture)]
    fastest = min(candidates, key=lambda candidate: candidate.time(rows, columns, depth, multiprocessors))
    return fastest._replace(depth=fastest.depth * 2 // itemsize)


def _of_equal_memory(architecture: int) -> int:
    # 8.6 and 8.9 have 99 KiB of shared memory, as 12.x has; what runs there is mma.sync in all of them.
    known = {80: 80, 87: 80, 90: 90, 100: 100, 103: 100, 110: 100}
    return known.get(architecture, 120)
