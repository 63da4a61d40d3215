"""Wall-clock timing of what the host does: whole steps of models, and the launches of single calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from kernel_pytorch.harness.clock.interleave import measure
from kernel_pytorch.harness.clock.sampling import FEWEST_WARM_UP_CALLS, Sampler, Subject, Timing

SHORTEST_SAMPLE, MOST_STEPS = 0.02, 20
"""Seconds of a sample of steps: shorter steps are repeated, at most so many times."""

LAUNCHES, ROUNDS = 40, 15
"""Calls per sample of launches, few enough not to fill the queue of the device, which would block the host; samples."""


class WallSampler(Sampler):
    """Times a subject by the wall clock.

    Garbage is collected as it is in use: a user pays for that too, and cycles may hold the memory of the next step.

    Args:
        subject: its one set is called again and again.
        device: where it runs.
        launches: time `LAUNCHES` calls until the last one returns; otherwise steps until the device is done.

    Attributes:
        returned: seconds until the first call of each sample returned, without waiting for the device.
    """

    method = "wall clock"

    def __init__(self, subject: Subject, device: torch.device, *, launches: bool = False) -> None:
        super().__init__(subject, device)
        self._launches, self.calls_per_sample = launches, LAUNCHES if launches else 1
        self.returned: list[float] = []

    def warm_up(self) -> bool:
        """Call the subject, and keep no output: those of models are large. False: a sample is long enough."""
        for _ in range(FEWEST_WARM_UP_CALLS):
            self.subject.run(0)
        return False

    def prepare(self, *, short: bool) -> None:
        """Find how many steps make a sample."""
        if not self._launches:
            self.calls_per_sample = max(1, min(MOST_STEPS, round(SHORTEST_SAMPLE / self.sample(0))))
            self.returned.clear()

    def sample(self, start: int) -> float:
        """Seconds per call."""
        run = self.subject.run
        wait_for(self.device)
        begin = time.perf_counter()
        run(0)
        self.returned.append(time.perf_counter() - begin)
        for _ in range(self.calls_per_sample - 1):
            run(0)
        if not self._launches:
            wait_for(self.device)
        return (time.perf_counter() - begin) / self.calls_per_sample


def step_seconds(
    steps: Mapping[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
    """Time steps that take turns: by name, seconds per step and seconds until it returned, one of each per round."""
    return {timing.name: (timing.samples, returned) for timing, returned in _in_turns(steps, device, rounds, False)}


def host_seconds(calls: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Median host time per call in seconds, by name, of calls that take turns; on a CPU that is the whole call."""
    return {timing.name: statistics.median(timing.samples) for timing, _ in _in_turns(calls, device, ROUNDS, True)}


def _in_turns(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, launches: bool
) -> list[tuple[Timing, list[float]]]:
    samplers: list[WallSampler] = []

    def make_sampler(subject: Subject, device: torch.device) -> WallSampler:
        samplers.append(WallSampler(subject, device, launches=launches))
        return samplers[-1]

    def subject(name: str, call: Callable[[], object]) -> Subject:
        return Subject(name, lambda index: call(), 1, 0)

    subjects = [subject(name, call) for name, call in calls.items()]
    timings = measure(subjects, device, rounds=rounds, make_sampler=make_sampler)
    return [(timings[sampler.subject.name], sampler.returned) for sampler in samplers]


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what was launched; no effect on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
