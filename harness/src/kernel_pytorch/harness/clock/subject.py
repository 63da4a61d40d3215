"""Subjects of the clock, and their timings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
