"""How fast a rested device is, and how fast the same work is once it has gone on for seconds.

A card that rested is cool and has its full clock; under matrix products it reaches its power limit within a fraction of
a second and slows down. A benchmark of short bursts reports the one, training runs at the other.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernel_pytorch.harness.clock.cuda import on_clock_stream

REST = 1.0
"""Seconds of idleness before the burst."""

LASTING = 2.0
"""Seconds of work without a pause."""

BATCH = 0.02
"""Seconds between two looks at the time: short beside a change of the clock, long beside the look itself."""

BURST = 0.1
"""The share of the batches at the beginning that counts as the burst; as many at the end count as sustained."""


@dataclass(frozen=True)
class Endurance:
    """Seconds per call of one subject.

    Attributes:
        burst: after a rest, the median of the first batches.
        sustained: the median of the last batches of continuous work.
    """

    burst: float
    sustained: float


def endurance(
    elapsed: Callable[[int], float],
    seconds_per_call: float,
    *,
    rest: float = REST,
    lasting: float = LASTING,
    sleep: Callable[[float], None] = time.sleep,
) -> Endurance:
    """Let the device rest, then work without a pause, and compare the first batches with the last.

    Args:
        elapsed: `elapsed(calls)` makes so many calls and returns how many seconds they took.
        seconds_per_call: about how long one takes.
        rest: seconds.
        lasting: seconds.
        sleep: for `rest`.
    """
    if not seconds_per_call > 0.0:
        raise ValueError(f"seconds_per_call is {seconds_per_call}; allowed is above 0")
    calls = max(1, math.ceil(BATCH / seconds_per_call))
    elapsed(1)
    sleep(rest)
    batches: list[float] = []
    worked = 0.0
    while worked < lasting:
        seconds = elapsed(calls)
        worked += seconds
        batches.append(seconds / calls)
    share = max(1, round(BURST * len(batches)))
    return Endurance(statistics.median(batches[:share]), statistics.median(batches[-share:]))


def elapsed_on_cuda(run: Callable[[int], object], sets: int, device: torch.device) -> Callable[[int], float]:
    """What `endurance` asks for, of a subject on a GPU: `run` on one input set after the other, between two events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def elapsed(calls: int) -> float:
        with on_clock_stream(device):
            begin.record()
            for call in range(calls):
                run(call % sets)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3

    return elapsed
