"""Jobs of a benchmark: one per operation, case and direction."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.clock import Subject, Timing, on_clock_stream
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.oracle import ErrorCheck, Run, random_like
from kernel_pytorch.harness.results import CaseRecord
from kernel_pytorch.harness.technique import Case, Cost, Direction, Implementation, Operation, Technique
from kernel_pytorch.harness.tensors import as_tuple, leaves, wanting
from kernel_pytorch.harness.verification import Expected, expect_for, judge_call

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
    return [
        Job(technique, operation, case, direction)
        for operation in technique.operations
        for case in operation.bench_grid.cases(device.type)[:first]
        for direction in directions or operation.directions
        if operation.differentiable or direction is Direction.FORWARD
    ]


def find_job(key: JobKey, device: torch.device) -> Job:
    """Find a job of the installed techniques by its key. Raises KeyError if there is none."""
    for job in jobs(discover().get(key[0]), device, directions=tuple(Direction)):
        if job.key == key:
            return job
    raise KeyError(f"no job {', '.join(key)}")


@dataclass(frozen=True)
class Workload:
    """The tensors of a job.

    Attributes:
        job: what is timed.
        arguments: by set; if a backward is timed, its floating-point tensors require gradients.
        incoming: gradients of the outputs, by set; empty for a forward.
    """

    job: Job
    arguments: list[tuple[Any, ...]]
    incoming: list[tuple[Tensor, ...]]

    @classmethod
    def of(cls, job: Job, sets: int, generator: torch.Generator) -> Workload:
        """Make the arguments of so many input sets."""
        operation, backward = job.operation, job.direction is not Direction.FORWARD
        arguments = [operation.arguments(job.case, generator) for _ in range(sets)]
        if not backward:
            return cls(job, arguments, [])
        wants = [name not in operation.constants for name in operation.signature()]
        own = [tuple(leaves(each, wants)) for each in arguments]
        with torch.no_grad():
            outputs = as_tuple(operation.reference.load()(*own[0]))
        return cls(job, own, [tuple(random_like(outputs, generator)) for _ in range(sets)])

    def timed_call(self, implementation: Implementation) -> Callable[[int], tuple[Tensor, ...]]:
        """Return a function of a set: it gives the outputs of the forward, or the gradients of all arguments."""
        calls, incoming = [implementation.bound_to(each) for each in self.arguments], self.incoming
        if self.job.direction is Direction.FORWARD:

            def forward(index: int) -> tuple[Tensor, ...]:
                with torch.no_grad():
                    return as_tuple(calls[index]())

            return forward
        wanted = [wanting(each) for each in self.arguments]
        if self.job.direction is Direction.BOTH:
            return lambda index: torch.autograd.grad(as_tuple(calls[index]()), wanted[index], incoming[index])
        graphs = [as_tuple(call()) for call in calls]
        return lambda index: torch.autograd.grad(graphs[index], wanted[index], incoming[index], retain_graph=True)

    def renew(self, generator: torch.Generator) -> Expected:
        """Write new contents into the memory of the first set, hidden from autograd, and compute what is expected.

        A graph that is timed repeatedly holds its inputs, so for a backward alone only the incoming gradients change.
        """
        job = self.job
        pairs: list[tuple[Any, Any]] = []
        if job.direction is not Direction.BACKWARD:
            pairs += zip(self.arguments[0], job.operation.arguments(job.case, generator), strict=True)
        if self.incoming:
            pairs += zip(self.incoming[0], random_like(self.incoming[0], generator), strict=True)
        for old, new in pairs:
            if isinstance(old, Tensor):
                old.data.copy_(new)  # `.data` has a separate version counter
        arguments = [a.detach() if isinstance(a, Tensor) else a for a in self.arguments[0]]
        incoming = list(self.incoming[0]) if self.incoming else None
        return expect_for(job.operation, arguments, generator.device, incoming=incoming)

    def examine(
        self, implementation: Implementation, call: Callable[[int], tuple[Tensor, ...]], against: Expected
    ) -> tuple[ErrorCheck, ...]:
        """Judge the call that was timed, on the tensors that it was timed on, after `renew`."""
        forward = self.job.direction is Direction.FORWARD

        def run() -> Run:
            with on_clock_stream(against.truth.outputs[0].device):
                results = call(0)
            if forward:
                return Run(results, {})
            named = zip(against.names, self.arguments[0], strict=True)
            names = [name for name, argument in named if wanting([argument])]
            return Run((), dict.fromkeys(against.reference.gradients) | dict(zip(names, results, strict=True)))

        return judge_call(run, implementation, against, Direction.FORWARD if forward else Direction.BACKWARD)


COPY, PRODUCTS = "a copy of the same size", "the same products"


def yardsticks(cost: Cost, case: Case, sets: int, bytes_per_set: int, device: torch.device) -> list[Subject]:
    """Return the subjects that take turns with the levels.

    Args:
        cost: of the call; the copy reads half of its bytes and writes the other half, by an elementwise kernel.
        case: its dtype is that of the products.
        sets: how many there are of each subject, as of the levels: the copy finds its bytes as cold as they do.
        bytes_per_set: as of the levels.
        device: where.
    """
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device).to(case.dtype)

    def products(index: int) -> list[Tensor]:
        with torch.no_grad():
            return [left @ right.t() for left, right in pairs[index]]  # as linear layers do

    # In float32, so it may be up to 7 bytes less. It negates: `clone` and `copy_` of contiguous tensors are a
    # `cudaMemcpyAsync`, whose speed jumps by half between sizes that are almost the same. The result is allocated in
    # each call, as that of a level is: on a CPU new pages cost time that no level avoids.
    halves = [torch.rand(max(1, cost.bytes // 8), generator=generator, device=device) for _ in range(sets)]
    found = [Subject(COPY, lambda index: torch.neg(halves[index]), sets, bytes_per_set)]
    if cost.products:
        pairs = [[(matrix(m, k), matrix(n, k)) for m, n, k in cost.products] for _ in range(sets)]
        found.append(Subject(PRODUCTS, products, sets, bytes_per_set))
    return found


def share(yardstick: Timing | None, timing: Timing) -> float | None:
    """Median speed of a level over that of a yardstick of the same rounds; None if it was timed by another method."""
    if yardstick is None or yardstick.method != timing.method:
        return None
    return statistics.median(a / b for a, b in zip(yardstick.samples, timing.samples, strict=True))
