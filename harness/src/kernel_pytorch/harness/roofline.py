"""Compare results with the ceilings of the machine, and reject those that exceed them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from kernel_pytorch.harness.machine import BandwidthPoint, Ceilings

TOLERANCE = 0.10
"""Share by which a result may exceed the fastest stream before it is rejected.

The streams include reading, which is faster than copying (on an H200 4.57 TB/s and 4.3). The tolerance allows for a
better mix of reads and writes, a clock that changed since the ceilings were measured, and noise.
"""


@dataclass(frozen=True)
class Attained:
    """The rates of one result.

    Attributes:
        bytes_per_second: compulsory bytes over time.
        flops_per_second: FLOPs of the definition over time.
        share_of_copy: of the copy rate of the memory that the working set fits in. Above 1 is possible for an
            operation that reads more than it writes, or writes in place.
        share_of_peak: of the fastest stream over that memory.
        share_of_matmul: of the matmul rate in that dtype; None where that was not measured.
        bound: which takes longer at the limits of the machine, moving the bytes or the arithmetic.
    """

    bytes_per_second: float
    flops_per_second: float
    share_of_copy: float
    share_of_peak: float
    share_of_matmul: float | None
    bound: Literal["memory", "compute"]


def ceiling_for(ceilings: Ceilings, pool_bytes: int) -> BandwidthPoint:
    """Return the bandwidth of the memory that a working set fits in.

    At a measured size it is the fastest point of that size or above, because a smaller working set can be at least as
    fast as a larger one. Between two sizes it is interpolated linearly in the logarithms, because a working set
    outgrows a cache gradually. Outside the measured sizes it is the nearest one.

    Args:
        ceilings: of the machine.
        pool_bytes: bytes that are touched before any is touched again; see `Timing.pool_bytes`.
    """
    if not ceilings.bandwidth:
        raise ValueError("ceilings.bandwidth is empty; measure the machine first")
    points = _envelope(ceilings.bandwidth)
    if pool_bytes <= points[0].bytes:
        return points[0]
    for below, above in itertools.pairwise(points):
        if pool_bytes <= above.bytes:
            return _between(below, above, pool_bytes)
    return points[-1]


def attain(
    cost_bytes: int, flops: int, seconds: float, ceilings: Ceilings, pool_bytes: int, dtype_name: str
) -> Attained:
    """Compare one result with the limits of the machine.

    Args:
        cost_bytes: compulsory traffic of one call.
        flops: of one call; 0 if they are not counted.
        seconds: per call.
        ceilings: of the machine that it was measured on.
        pool_bytes: see `ceiling_for`.
        dtype_name: of the principal input, without the `torch.` prefix.
    """
    if not (math.isfinite(seconds) and seconds > 0.0):
        raise ValueError(f"seconds is {seconds}; it must be finite and above 0")
    if cost_bytes < 0 or flops < 0:
        raise ValueError(f"cost_bytes is {cost_bytes} and flops {flops}; neither may be below 0")
    point = ceiling_for(ceilings, pool_bytes)
    matmul = ceilings.matmul_flops_per_second.get(dtype_name)
    share_of_copy = cost_bytes / seconds / point.bytes_per_second
    share_of_matmul = None if matmul is None else flops / seconds / matmul
    return Attained(
        bytes_per_second=cost_bytes / seconds,
        flops_per_second=flops / seconds,
        share_of_copy=share_of_copy,
        share_of_peak=cost_bytes / seconds / point.peak_bytes_per_second,
        share_of_matmul=share_of_matmul,
        bound="compute" if share_of_matmul is not None and share_of_matmul > share_of_copy else "memory",
    )


def faster_than_physics(attained: Attained, *, tolerance: float = TOLERANCE) -> str | None:
    """Why a result cannot be true, or None.

    Args:
        attained: the result's rates.
        tolerance: by which share of a limit it may be exceeded.
    """
    limits = (
        ("memory", attained.share_of_peak, f"{attained.bytes_per_second / 1e9:,.1f} GB/s", "fastest stream"),
        ("arithmetic", attained.share_of_matmul, f"{attained.flops_per_second / 1e12:,.2f} TFLOP/s", "matrix product"),
    )
    for what, share, figure, limit in limits:
        if share is not None and share > 1.0 + tolerance:
            return (
                f"{what}: {figure} is {share:.2f} times the {limit} measured on this machine, more than the "
                f"{1.0 + tolerance:.2f} that noise explains; work was skipped, miscounted or not waited for"
            )
    return None


def _envelope(points: tuple[BandwidthPoint, ...]) -> list[BandwidthPoint]:
    """Points by size, each at the fastest rates of its size or above."""
    raised: list[BandwidthPoint] = []
    copy = peak = 0.0
    for point in sorted(points, key=lambda point: point.bytes, reverse=True):
        copy, peak = max(copy, point.bytes_per_second), max(peak, point.peak_bytes_per_second)
        raised.append(point.model_copy(update={"bytes_per_second": copy, "peak_bytes_per_second": peak}))
    return raised[::-1]


def _between(below: BandwidthPoint, above: BandwidthPoint, pool_bytes: int) -> BandwidthPoint:
    share = math.log(pool_bytes / below.bytes) / math.log(above.bytes / below.bytes)

    def rate(low: float, high: float) -> float:
        return low ** (1.0 - share) * high**share

    return BandwidthPoint(
        bytes=pool_bytes,
        bytes_per_second=rate(below.bytes_per_second, above.bytes_per_second),
        peak_bytes_per_second=rate(below.peak_bytes_per_second, above.peak_bytes_per_second),
        memory=above.memory,
    )
