"""Wall-clock timing on the processor."""

from __future__ import annotations

import time

import torch

from kernel_pytorch.harness.clock.sampling import (
    FEWEST_WARM_UP_CALLS,
    Rotation,
    calibrate,
    calls_per_sample,
    garbage_collection_paused,
)
from kernel_pytorch.harness.clock.subject import Subject

WALL_CLOCK = "wall clock, rotating inputs"


class CpuSampler:
    """Times a subject by the wall clock, as many calls at once as `calls_per_sample` says.

    It changes neither thread counts nor affinity.
    """

    def __init__(self, subject: Subject, device: torch.device) -> None:
        self.subject = subject
        self.method = WALL_CLOCK
        self.calls_per_sample = subject.sets
        self._device = device
        self._rotation = Rotation(subject)

    def warm_up(self) -> bool:
        """Call the subject on every set. False: batches make calls of any length measurable here."""
        self._rotation.run(self._rotation.order(0, max(self.subject.sets, FEWEST_WARM_UP_CALLS)))
        return False

    def prepare(self, *, short: bool) -> None:
        """Find how many calls make a sample."""
        self.calls_per_sample = calls_per_sample(calibrate(lambda calls: self._elapsed(0, calls)), self.subject.sets)

    def sample(self, start: int) -> float:
        """Seconds per call, from set `start` on."""
        return self._elapsed(start, self.calls_per_sample) / self.calls_per_sample

    def _elapsed(self, start: int, calls: int) -> float:
        order = self._rotation.order(start, calls)
        with garbage_collection_paused():
            begin = time.perf_counter_ns()
            self._rotation.run(order)
            return (time.perf_counter_ns() - begin) * 1e-9
