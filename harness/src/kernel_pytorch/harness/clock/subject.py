"""What is timed, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Subject:
    """One function to time, with a pool of input sets that its calls rotate through.

    A network's activations were written long before they are read again, so a call timed on inputs that still sit in
    the cache is timed on a machine that no model runs on. Rotating through a pool larger than the cache finds every
    set cold; `sets_needed` says how many that takes.

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
        calls_per_sample: how many calls each sample is the mean of.
        method: how it was timed, for people. Times of different methods are different quantities.
        pool_bytes: bytes of all rotated sets together: decides which level of memory is the ceiling.
        spans: when each sample began and ended, in seconds of `time.perf_counter`: what else happened then?
    """

    name: str
    samples: tuple[float, ...]
    calls_per_sample: int
    method: str
    pool_bytes: int
    spans: tuple[tuple[float, float], ...] = ()
