"""Jobs of a benchmark: one per operation, case and direction."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.results import CaseRecord
from kernel_pytorch.harness.technique import Case, Direction, Operation, Technique

SHORT_CASES = 1
QUICK_CASES = 2

JobKey = tuple[str, str, str, str]
"""Technique, operation, label of the case, direction: names a job in another process."""


@dataclass(frozen=True)
class Job:
    """One table of figures: an operation, a case, a direction."""

    technique: Technique
    operation: Operation
    case: Case
    direction: Direction

    @property
    def key(self) -> JobKey:
        """Identifies the job in another process."""
        return self.technique.name, self.operation.name, CaseRecord.of(self.case).label, self.direction.value

    @property
    def label(self) -> str:
        """For progress bars."""
        return f"{self.operation.name} {self.direction.value}, {CaseRecord.of(self.case).label}"


def jobs(
    technique: Technique,
    device: torch.device,
    *,
    first: int | None = None,
    directions: tuple[Direction, ...] | None = None,
) -> list[Job]:
    """List the jobs of a technique on that device; `first` keeps so many cases of each operation.

    Directions are those of each operation if none are given; without gradients only the forward is timed.
    """
    found = []
    for operation in technique.operations:
        cases = operation.bench_grid.cases(device.type)
        for case in cases[:first]:
            found += [
                Job(technique, operation, case, direction)
                for direction in directions or operation.directions
                if operation.differentiable or direction is Direction.FORWARD
            ]
    return found


def find_job(key: JobKey, device: torch.device) -> Job:
    """Find a job of the installed techniques by its key. Raises KeyError if there is none."""
    for job in jobs(discover().get(key[0]), device, directions=tuple(Direction)):
        if job.key == key:
            return job
    raise KeyError(f"no job {', '.join(key)}")
