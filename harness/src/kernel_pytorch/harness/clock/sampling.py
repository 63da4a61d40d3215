"""Subjects of the clock, what samplers of all devices share, and the sampler of processors.

The pool is all input sets of a subject. A sample consists of whole passes over it, unless they take too long. Every
subject is then timed on the same sets in the same order, and leaves the cache as it found it: with the end of the pool.
If samples had a fixed time, the second subject of a round would find the inputs of the first one in the cache.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

SHORTEST_SAMPLE = 2e-3
"""Seconds. Long compared with the resolution of the clock and the cost of reading it."""

LONGEST_PASS = 0.1
"""Seconds. If a pass takes longer, a sample visits a part of the pool: such calls are so long (0.4 ms at `MOST_SETS`)
and so small (a 256th of the pool) that warm inputs hardly change their time."""

FEWEST_WARM_UP_CALLS = 3

CALIBRATION_SECONDS = 0.01


@dataclass(frozen=True)
class Subject:
    """One function to time, with a pool of input sets through which its calls rotate.

    A network reads activations long after they were written, so inputs that are still in the cache give times that no
    model has. In a pool larger than the cache every set is cold; `sets_needed` says how many sets that takes.

    Attributes:
        name: unique among the subjects of one measurement.
        run: `run(i)` performs one call on input set `i`, `0 <= i < sets`, and returns what the call allocated. The
            clock keeps the last output of every set alive, so that outputs do not land in one warm block of memory.
            On CUDA it must only launch work, never wait for it, or it cannot be captured into a graph.
        sets: how many input sets there are; the same for all subjects of one measurement.
        bytes_per_set: bytes that one call touches: its inputs and its outputs.
    """

    name: str
    run: Callable[[int], object]
    sets: int
    bytes_per_set: int

    def __post_init__(self) -> None:
        if self.sets < 1:
            raise ValueError(f"{self.name}: sets is {self.sets}; allowed is 1 or more")
        if self.bytes_per_set < 0:
            raise ValueError(f"{self.name}: bytes_per_set is {self.bytes_per_set}; allowed is 0 or more")


@dataclass(frozen=True)
class Timing:
    """The times of one subject.

    Attributes:
        name: the subject's.
        samples: seconds per call, one per round.
        calls_per_sample: each sample is the mean of so many calls.
        method: how it was timed, for people. Times of different methods are different quantities.
        pool_bytes: bytes of all rotated sets together: decides which level of memory is the ceiling.
        spans: begin and end of each sample, in seconds of `time.perf_counter`.
    """

    name: str
    samples: tuple[float, ...]
    calls_per_sample: int
    method: str
    pool_bytes: int
    spans: tuple[tuple[float, float], ...] = ()


def calls_per_sample(seconds_per_call: float, sets: int) -> int:
    """Whole passes over the pool that last `SHORTEST_SAMPLE`, or the part of one that fits in `LONGEST_PASS`."""
    seconds_per_pass = seconds_per_call * sets
    if seconds_per_pass > LONGEST_PASS:
        return math.ceil(LONGEST_PASS / seconds_per_call)
    return sets * math.ceil(SHORTEST_SAMPLE / seconds_per_pass)


def calibrate(elapsed: Callable[[int], float]) -> float:
    """Seconds per call, from so many that `elapsed(calls)`, in seconds, is long twice: once may be an interruption."""
    calls = 1
    while True:
        seconds = elapsed(calls)
        if seconds >= CALIBRATION_SECONDS:
            seconds = min(seconds, elapsed(calls))
        if seconds >= CALIBRATION_SECONDS or calls == 2**20:
            return max(seconds / calls, 1e-9)
        calls *= 2


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Keep the garbage collector from running inside a sample."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


WALL_CLOCK = "wall clock, rotating inputs"


class Sampler:
    """Times one subject; this one by the wall clock of a processor, whose thread counts and affinity it leaves alone.

    `measure` owns the order of the calls: `warm_up`, `prepare`, then `sample` every round.

    The last output of each set stays alive. Freed at once, its memory would be given to the next call, and outputs
    would be written to a block that never leaves the cache.

    Attributes:
        subject: what is timed.
        method: see `Timing`.
        calls_per_sample: see `Timing`.
    """

    method = WALL_CLOCK

    def __init__(self, subject: Subject, device: torch.device) -> None:
        self.subject, self.device = subject, device
        self.calls_per_sample = subject.sets
        self.release()

    def warm_up(self) -> bool:
        """Call the subject on every set; True if single calls are too short to be timed from the host."""
        self.run(self.order(0, max(self.subject.sets, FEWEST_WARM_UP_CALLS)))
        return False  # batches make calls of any length measurable here

    def prepare(self, *, short: bool) -> None:
        """Fix `method` and `calls_per_sample`. `short`: some subject of this measurement is too short."""
        self.calls_per_sample = calls_per_sample(calibrate(lambda calls: self._elapsed(0, calls)), self.subject.sets)

    def sample(self, start: int) -> float:
        """Seconds per call, from set `start` on."""
        return self._elapsed(start, self.calls_per_sample) / self.calls_per_sample

    def order(self, start: int, calls: int) -> list[int]:
        """Indices of the sets that `calls` calls from set `start` on visit."""
        return [(start + step) % self.subject.sets for step in range(calls)]

    def run(self, order: list[int]) -> None:
        """Call the subject once per index."""
        call, outputs = self.subject.run, self._outputs
        for index in order:
            outputs[index] = call(index)

    def release(self) -> None:
        """Release the outputs."""
        self._outputs: list[object] = [None] * self.subject.sets

    def _elapsed(self, start: int, calls: int) -> float:
        order = self.order(start, calls)
        with garbage_collection_paused():
            begin = time.perf_counter_ns()
            self.run(order)
            return (time.perf_counter_ns() - begin) * 1e-9


MOST_SETS = 256
"""Filling a larger pool of small tensors takes too long. Such a pool fits in the cache, which its size shows."""

FEWEST_SETS = {"cpu": 2, "cuda": 8}
"""The addresses of buffers decide how they share the channels of a GPU's memory: on an H200 a copy over two sets of
117 MB took 12 % longer than over four and more; over eight it was within 1 % of the copy over 64."""

ASSUMED_CPU_CACHE_BYTES = 32 * 2**20
"""Last-level cache of a processor whose cache is unknown."""

SYSFS_CPU = Path("/sys/devices/system/cpu")

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def sets_needed(bytes_per_set: int, device: torch.device | str, *, memory_limit_bytes: int | None = None) -> int:
    """How many input sets a `Subject` needs so that its calls see cold inputs.

    Args:
        bytes_per_set: bytes that one call touches: inputs and outputs.
        device: where they lie.
        memory_limit_bytes: the pool stays below this, if two sets do, or one that is larger than the cache by itself.

    Returns:
        Enough sets for the pool to exceed `cold_pool_bytes`, at least `FEWEST_SETS` and at most `MOST_SETS`.
    """
    if bytes_per_set < 1:
        raise ValueError(f"bytes_per_set is {bytes_per_set}; allowed is 1 or more")
    cold = cold_pool_bytes(device)
    sets = cold // bytes_per_set + 1
    sets = min(max(sets, FEWEST_SETS[torch.device(device).type]), MOST_SETS)
    if memory_limit_bytes is not None:
        sets = min(sets, memory_limit_bytes // bytes_per_set)
    return max(sets, 1 if bytes_per_set > cold else 2)


def cold_pool_bytes(device: torch.device | str) -> int:
    """The size in bytes above which a pool leaves nothing useful in the cache between two uses of a set.

    Four times the L2 cache of a GPU, whose replacement is not least-recently-used; twice the last-level cache of a
    processor.
    """
    device = torch.device(device)
    factor = 4 if device.type == "cuda" else 2
    return factor * (last_level_cache_bytes(device) or ASSUMED_CPU_CACHE_BYTES)


def last_level_cache_bytes(device: torch.device | str) -> int | None:
    """Bytes of the L2 cache of a GPU, or of all last-level caches that this process may use; None if unknown."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    if device.type == "cpu":
        return _cpu_cache_bytes(SYSFS_CPU)
    raise ValueError(f"device is {device}; the clock knows cpu and cuda")


def _cpu_cache_bytes(root: Path) -> int | None:
    """Sum of the distinct last-level caches: a large processor has one for every few cores."""
    sizes: dict[tuple[int, str], int] = {}
    for cpu in sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]:
        for cache in (root / f"cpu{cpu}" / "cache").glob("index*"):
            try:
                level = int((cache / "level").read_text())
                size = (cache / "size").read_text().strip()
                sharers = (cache / "shared_cpu_list").read_text().strip()
                kind = (cache / "type").read_text().strip()
                amount = int(size.rstrip("KMG")) * _UNITS.get(size[-1:], 1)
            except (OSError, ValueError):
                continue
            if kind != "Instruction":
                sizes[level, sharers] = amount
    last = max((level for level, _ in sizes), default=0)
    return sum(amount for (level, _), amount in sizes.items() if level == last) or None
