"""Common parts of the samplers of both device types.

A sample consists of whole passes over the pool, unless they take too long. Every subject is then timed on the same
sets in the same order, and leaves the cache as it found it: with the end of the pool. If samples had a fixed time, the
second subject of a round would find the inputs of the first one in the cache.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from typing import Protocol

from kernel_pytorch.harness.clock.subject import Subject

SHORTEST_SAMPLE = 2e-3
"""Seconds. Long compared with the resolution of the clock and the cost of reading it."""

LONGEST_PASS = 0.1
"""Seconds. If a pass takes longer, a sample visits a part of the pool: such calls are so long (0.4 ms at `MOST_SETS`)
and so small (a 256th of the pool) that warm inputs hardly change their time."""

FEWEST_WARM_UP_CALLS = 3

CALIBRATION_SECONDS = 0.01


class Sampler(Protocol):
    """Times one subject. `measure` owns the order of the calls: `warm_up`, `prepare`, then `sample` every round."""

    subject: Subject
    method: str
    calls_per_sample: int

    def warm_up(self) -> bool:
        """Call the subject on every set; True if a call is too short to be timed one by one from the host."""
        ...

    def prepare(self, *, short: bool) -> None:
        """Fix `method` and `calls_per_sample`. `short`: some subject of this measurement is too short."""
        ...

    def sample(self, start: int) -> float:
        """Seconds per call, from set `start` on."""
        ...


class Rotation:
    """Calls a subject on one set after the other.

    The last output of each set stays alive. Freed at once, its memory would be given to the next call, and outputs
    would be written to a block that never leaves the cache.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._outputs: list[object] = [None] * subject.sets

    def order(self, start: int, calls: int) -> list[int]:
        """Indices of the sets that `calls` calls from set `start` on visit."""
        return [(start + step) % self._subject.sets for step in range(calls)]

    def run(self, order: list[int]) -> None:
        """Call the subject once per index."""
        call, outputs = self._subject.run, self._outputs
        for index in order:
            outputs[index] = call(index)

    def release(self) -> None:
        """Release the outputs."""
        self._outputs = [None] * self._subject.sets


def calls_per_sample(seconds_per_call: float, sets: int) -> int:
    """Whole passes over the pool that last `SHORTEST_SAMPLE`, or the part of one that fits in `LONGEST_PASS`."""
    seconds_per_pass = seconds_per_call * sets
    if seconds_per_pass > LONGEST_PASS:
        return math.ceil(LONGEST_PASS / seconds_per_call)
    return sets * math.ceil(SHORTEST_SAMPLE / seconds_per_pass)


def calibrate(elapsed: Callable[[int], float]) -> float:
    """Seconds per call, found by doubling the calls until `elapsed(calls)` is long enough to trust, in seconds."""
    calls = 1
    while (seconds := elapsed(calls)) < CALIBRATION_SECONDS and calls < 2**20:
        calls *= 2
    return max(seconds / calls, 1e-9)


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
