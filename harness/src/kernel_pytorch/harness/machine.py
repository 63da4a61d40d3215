"""Measured ceilings of this machine, with which every result is compared.

No program reaches the numbers of a data sheet, so shares of them say little. These ceilings are reached here by simple
code: a copy, a matrix product, the smallest operation.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from kernel_pytorch.harness.clock import Subject, measure
from kernel_pytorch.harness.clock.sampling import ASSUMED_CPU_CACHE_BYTES, last_level_cache_bytes
from kernel_pytorch.harness.environment import Environment, describe_environment, memory_bytes
from kernel_pytorch.harness.records import Amount, Count, Name, Part, Record

WORKING_SETS = {
    "cpu": (1 / 256, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 1, 2, 4, 8),
    "cuda": (1 / 64, 1 / 16, 1 / 4, 1 / 2, 1, 2, 4, 8, 16, 32),
}
"""Sizes of the streams, in last-level caches. Dense around 1, where the rate falls."""

QUICK_WORKING_SETS = (1 / 16, 1 / 2, 2, 8)

MATMUL_SIZES = {
    "cpu": ((512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048)),
    "cuda": ((4096, 4096, 4096), (4096, 14336, 4096), (8192, 8192, 8192)),
}
"""Rows, columns and depth of the products of a linear layer, from small to large."""

MATMUL_REST = {"cpu": 0.0, "cuda": 0.3}
"""Seconds of rest before each product: directly after another one, the power limit slows a card down."""

MATMUL_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}

RATES = ("bytes_per_second", "peak_bytes_per_second")

LONGEST_MATMUL = 0.25
"""Seconds. A processor without bfloat16 instructions would need minutes for the largest sizes."""


class BandwidthPoint(Part):
    """The rate of streams over one working set.

    Attributes:
        bytes: size of the working set.
        bytes_per_second: of `destination.copy_(source)`, bytes read plus bytes written. What an operation that writes
            its result to new memory can reach.
        peak_bytes_per_second: of the fastest stream: copy, scaling in place, or reading only. No honest result exceeds
            it. On a processor it is up to twice the copy's: an ordinary store first reads the line that it is about to
            overwrite, which a copy pays for and its byte count does not show.
        memory: the level that the working set fits in.
    """

    bytes: Count
    bytes_per_second: Amount
    peak_bytes_per_second: Amount
    memory: Literal["cache", "DRAM"]


class Ceilings(Part):
    """The measured limits of a machine.

    Attributes:
        bandwidth: one point per working set, smallest first.
        matmul_flops_per_second: by name of the dtype; random data, because a GPU multiplies zeros faster.
        launch_overhead_seconds: host time of the smallest operation; on CUDA that of launching it, without waiting.
    """

    bandwidth: tuple[BandwidthPoint, ...]
    matmul_flops_per_second: dict[Name, Amount]
    launch_overhead_seconds: Amount


class Machine(Record):
    """A machine and its measured ceilings."""

    kind = "a record of a machine"

    environment: Environment
    ceilings: Ceilings

    @property
    def slug(self) -> str:
        """Folder name for its results."""
        return self.environment.slug


def measure_machine(
    device: torch.device | str, *, quick: bool = False, on_step: Callable[[str], None] | None = None
) -> Machine:
    """Describe a device and measure its ceilings; see `measure_ceilings`."""
    return Machine(
        environment=describe_environment(device), ceilings=measure_ceilings(device, quick=quick, on_step=on_step)
    )


def higher(first: Ceilings, second: Ceilings) -> Ceilings:
    """Return the higher of two measurements of each limit: disturbances lower a measured limit and never raise it."""
    other = {point.bytes: point for point in second.bandwidth}
    raised = []
    for point in first.bandwidth:
        again = other.get(point.bytes, point)
        rates = {name: max(getattr(point, name), getattr(again, name)) for name in RATES}
        raised.append(point.model_copy(update=rates))
    matmul = first.matmul_flops_per_second
    return Ceilings(
        bandwidth=tuple(raised),
        matmul_flops_per_second={
            name: max(rate, second.matmul_flops_per_second.get(name, rate)) for name, rate in matmul.items()
        },
        launch_overhead_seconds=min(first.launch_overhead_seconds, second.launch_overhead_seconds),
    )


def measure_ceilings(
    device: torch.device | str, *, quick: bool = False, on_step: Callable[[str], None] | None = None
) -> Ceilings:
    """Measure bandwidth, matmul rate and launch overhead.

    Args:
        device: the device; nothing else should run on it.
        quick: fewer sizes and rounds, for a first look.
        on_step: called with the name of each step before it begins.

    Returns:
        Ceilings. Each rate is the best of several medians, because a limit has to be reached only once.
    """
    device = torch.device(device)
    announce = on_step or (lambda step: None)
    announce("launch overhead")
    launch_overhead = _launch_overhead(device)
    bandwidth = _bandwidth(device, quick, announce)
    rates: dict[str, float] = {}
    for dtype in MATMUL_DTYPES[device.type]:
        name = str(dtype).removeprefix("torch.")
        announce(f"matmul {name}")
        rates[name] = _matmul_rate(device, dtype, quick)
    if device.type == "cpu":  # a processor without bfloat16 instructions is faster in float32, which a kernel may use
        rates["bfloat16"] = max(rates.values())
    return Ceilings(bandwidth=bandwidth, matmul_flops_per_second=rates, launch_overhead_seconds=launch_overhead)


def _bandwidth(device: torch.device, quick: bool, announce: Callable[[str], None]) -> tuple[BandwidthPoint, ...]:
    cache = last_level_cache_bytes(device) or ASSUMED_CPU_CACHE_BYTES
    limit = memory_bytes(device) // 8
    factors = QUICK_WORKING_SETS if quick else WORKING_SETS[device.type]
    sizes = [size for size in (int(cache * factor) // 4096 * 4096 for factor in factors) if size <= limit]
    copy, peak = dict.fromkeys(sizes, 0.0), dict.fromkeys(sizes, 0.0)
    # Repeats are the outer loop: a disturbance of a few seconds then affects one repeat of some sizes, not all of one.
    for repeat in range(2 if quick else 5):
        for size in sizes:
            announce(f"streams over {size / 2**20:.3g} MiB, repeat {repeat + 1}")
            rates = _stream_rates(device, size, rounds=5)
            copy[size] = max(copy[size], rates["copy"])
            peak[size] = max(peak[size], *rates.values())
    return tuple(
        BandwidthPoint(
            bytes=size,
            bytes_per_second=copy[size],
            peak_bytes_per_second=peak[size],
            memory="cache" if size <= cache else "DRAM",
        )
        for size in sizes
    )


def _stream_rates(device: torch.device, size: int, rounds: int) -> dict[str, float]:
    """Bytes per second of three streams over the same `size` bytes."""
    whole = torch.randn(size // 4, device=device)
    source, destination = whole.chunk(2)
    streams: dict[str, tuple[Callable[[int], object], int]] = {
        "copy": (lambda index: destination.copy_(source), size),
        "scale in place": (lambda index: whole.mul_(1.0), 2 * size),
        "read": (lambda index: whole.amax(), size),
    }
    subjects = [Subject(name, run, sets=1, bytes_per_set=size) for name, (run, _) in streams.items()]
    timings = measure(subjects, device, rounds=rounds)
    return {name: moved / statistics.median(timings[name].samples) for name, (_, moved) in streams.items()}


def reading_rate(device: torch.device) -> float:
    """Measure the rate of reading memory in bytes per second, the best of three medians."""
    size = min(2**32, memory_bytes(device) // 16)  # far more than any cache
    return max(_stream_rates(device, size, rounds=5)["read"] for _ in range(3))


def _matmul_rate(device: torch.device, dtype: torch.dtype, quick: bool) -> float:
    """The best rate of a linear layer, in FLOP/s, under torch's current float32 matmul precision."""
    best = 0.0
    for rows, columns, depth in MATMUL_SIZES[device.type][: 2 if quick else None]:
        x, weight = (torch.randn(size, depth, device=device).to(dtype) for size in (rows, columns))
        product = torch.empty(rows, columns, device=device, dtype=dtype)
        touched = x.nbytes + weight.nbytes + product.nbytes
        subject = Subject("matmul", _product(x, weight.t(), product), sets=1, bytes_per_set=touched)
        for _ in range(2 if quick else 5):
            time.sleep(MATMUL_REST[device.type])
            seconds = statistics.median(measure([subject], device, rounds=5)["matmul"].samples)
            best = max(best, 2.0 * rows * columns * depth / seconds)
        if 8 * seconds > LONGEST_MATMUL:
            break
    return best


def _product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> Callable[[int], object]:
    return lambda index: torch.matmul(left, right, out=out)


def _launch_overhead(device: torch.device) -> float:
    """Measure host seconds per call of an addition to one element: the best of several batches, without waiting."""
    one = torch.ones(1, device=device)
    # A GPU queues about a thousand launches; beyond that the host waits, and the GPU would be timed.
    calls = 200
    best = float("inf")
    for _ in range(20):
        begin = time.perf_counter_ns()
        for _ in range(calls):
            one.add_(1.0)
        best = min(best, (time.perf_counter_ns() - begin) * 1e-9 / calls)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return best


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
    points = sorted(ceilings.bandwidth, key=lambda point: point.bytes)
    sizes = np.log([point.bytes for point in points])

    def rate(name: str) -> float:
        fastest = np.maximum.accumulate([getattr(point, name) for point in reversed(points)])[::-1]
        return float(np.exp(np.interp(math.log(max(pool_bytes, 1)), sizes, np.log(fastest))))

    memory = next((point.memory for point in points if pool_bytes <= point.bytes), points[-1].memory)
    return BandwidthPoint(bytes=pool_bytes, memory=memory, **{name: rate(name) for name in RATES})


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
