"""Timing the implementations of a technique, each proven right before and after it is timed."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .accuracy import measure_accuracy
from .availability import why_not_timed
from .clock import Subject, Timing, compare_paired, measure, median_interval, on_clock_stream, sets_needed
from .machine import Machine
from .oracle import Judgement
from .results import CaseRecord, ComparisonRecord, IntervalRecord, Measurement, Results, Status
from .roofline import attain, faster_than_physics
from .sources import implementation_digest
from .technique import Case, Direction, Implementation, Level, Operation, Technique
from .verification import RANDOM, Trial, examine, standard

ROUNDS, QUICK_ROUNDS = 30, 12
MEMORY_LIMIT = {"cpu": 2 * 2**30, "cuda": 24 * 2**30}  # bytes for all input sets of one case
PYTORCH = (Level.REFERENCE, Level.NATIVE, Level.TORCHSCRIPT, Level.COMPILE)
DIRECTIONS = (Direction.FORWARD, Direction.BACKWARD)


@dataclass(frozen=True)
class Job:
    """One table of figures: an operation, a case, a direction."""

    technique: Technique
    operation: Operation
    case: Case
    direction: Direction

    @property
    def label(self) -> str:
        """For progress bars."""
        return f"{self.operation.name} {self.direction.value}, {self.case.name} {self.case.dtype_name}"


def jobs(
    technique: Technique,
    device: torch.device,
    *,
    quick: bool = False,
    directions: tuple[Direction, ...] = DIRECTIONS,
) -> list[Job]:
    """What a benchmark of this technique measures on that device; `quick` keeps the first two cases of an operation."""
    found = []
    for operation in technique.operations:
        cases = operation.bench_grid.cases(device.type)
        for case in cases[:2] if quick else cases:
            found += [Job(technique, operation, case, direction) for direction in directions]
    return found


def benchmark(
    technique: Technique,
    machine: Machine,
    device: torch.device,
    *,
    levels: list[str] | None = None,
    quick: bool = False,
    directions: tuple[Direction, ...] = DIRECTIONS,
    on_job: Callable[[str], None] = lambda label: None,
    on_round: Callable[[], None] | None = None,
) -> Results:
    """Measure every job of a technique, and its accuracy on real activations.

    Args:
        technique: what to measure.
        machine: the ceilings to hold the figures against, measured on this machine.
        device: where.
        levels: names of the implementations, or None for all. The reference and native always run: they are baselines.
        quick: fewer cases and rounds.
        directions: passes to time.
        on_job: called with the label of each job before it starts.
        on_round: called after each round of the clock.

    Returns:
        The results; after Ctrl-C those that stood by then, marked as not complete.
    """
    wanted = None if levels is None else {*levels, "reference", "native"}
    measurements: list[Measurement] = []
    accuracy, real_input, complete = (), "", True
    try:
        for job in jobs(technique, device, quick=quick, directions=directions):
            on_job(job.label)
            rounds = QUICK_ROUNDS if quick else ROUNDS
            measurements += run_job(job, machine, device, wanted, rounds=rounds, on_round=on_round)
        on_job("accuracy on real activations")
        accuracy, real_input = measure_accuracy(technique, device, wanted)
    except KeyboardInterrupt:
        complete = False
    return Results(
        technique=technique.name,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        quick=quick,
        complete=complete,
        machine=machine,
        sources={f"{o.name}/{i.name}": implementation_digest(i) for o in technique.operations for i in o.implementations},
        measurements=tuple(measurements),
        accuracy=accuracy,
        real_input=real_input,
    )


@contextlib.contextmanager
def _reusable_graphs(direction: Direction) -> Iterator[None]:
    """Timing a backward alone runs it again and again on one graph; buffers donated by torch.compile forbid that."""
    if direction is Direction.BACKWARD:
        with torch._functorch.config.patch(donated_buffer=False):
            yield
    else:
        yield


def run_job(
    job: Job,
    machine: Machine,
    device: torch.device,
    wanted: set[str] | None = None,
    *,
    rounds: int = ROUNDS,
    on_round: Callable[[], None] | None = None,
) -> list[Measurement]:
    """Check, time, check again on fresh inputs, and set against the machine's limits."""
    implementations = [i for i in job.operation.implementations if wanted is None or i.name in wanted]
    with _reusable_graphs(job.direction):
        found = _check_and_time(job, machine, device, implementations, rounds, on_round)
    return [found[i.name] for i in implementations]


def _check_and_time(
    job: Job,
    machine: Machine,
    device: torch.device,
    implementations: list[Implementation],
    rounds: int,
    on_round: Callable[[], None] | None,
) -> dict[str, Measurement]:
    backward = job.direction is not Direction.FORWARD
    found: dict[str, Measurement] = {}
    torch._dynamo.reset()  # every job has a new shape; past eight torch.compile would give up
    before = standard(job.operation, Trial(job.case, RANDOM), device)
    for implementation in implementations:
        reason = why_not_timed(job.technique, implementation, device, job.case.dtype)
        if reason is not None:
            found[implementation.name] = _refusal(job, implementation, "unavailable", reason)
        elif problem := _problem(examine(implementation, before, backward=backward)):
            found[implementation.name] = _refusal(job, implementation, "wrong", problem)
    runnable = [i for i in implementations if i.name not in found]
    timings = _time(job, runnable, device, rounds, on_round) if runnable else {}
    after = standard(job.operation, Trial(job.case, RANDOM), device, seed=1)
    checked = {i.name: examine(i, after, backward=backward) for i in runnable}
    trusted = {name: timing for name, timing in timings.items() if not _problem(checked[name])}
    for implementation in runnable:
        if problem := _problem(checked[implementation.name]):
            problem = f"after timing, on fresh inputs: {problem}"
            found[implementation.name] = _refusal(job, implementation, "wrong", problem)
        else:
            found[implementation.name] = _measurement(job, implementation, trusted, checked[implementation.name], machine)
    return found


def _time(
    job: Job,
    implementations: list[Implementation],
    device: torch.device,
    rounds: int,
    on_round: Callable[[], None] | None,
) -> dict[str, Timing]:
    per_set = max(1, job.operation.cost(job.case, job.direction).bytes)
    # Each implementation holds outputs or graphs of its own for every set, so the memory limit is shared.
    limit = MEMORY_LIMIT[device.type] // (2 * len(implementations))
    sets = sets_needed(per_set, device, memory_limit_bytes=limit)
    generator = torch.Generator(device).manual_seed(0)
    pool = [job.operation.inputs(job.case, generator) for _ in range(sets)]
    with on_clock_stream(device):
        subjects = [
            Subject(i.name, _call(i.load(), pool, job.direction, generator), sets, per_set) for i in implementations
        ]
    return measure(subjects, device, rounds=rounds, on_round=on_round)


def _call(
    function: Callable[..., Any], pool: list[tuple[Any, ...]], direction: Direction, generator: torch.Generator
) -> Callable[[int], object]:
    """What one timed call does on one input set."""
    if direction is Direction.FORWARD:

        def forward(index: int) -> object:
            with torch.no_grad():
                return function(*pool[index])

        return forward

    leaves = [[a.detach().requires_grad_() if _is_float(a) else a for a in arguments] for arguments in pool]
    wanted = [[a for a in arguments if _is_float(a)] for arguments in leaves]

    def outputs_of(index: int) -> tuple[Tensor, ...]:
        result = function(*leaves[index])
        return (result,) if isinstance(result, Tensor) else result

    incoming = [
        tuple(torch.randn(o.shape, generator=generator, device=o.device).to(o.dtype) for o in outputs_of(index))
        for index in range(len(pool))
    ]
    if direction is Direction.BOTH:
        return lambda index: torch.autograd.grad(outputs_of(index), wanted[index], incoming[index])
    graphs = [outputs_of(index) for index in range(len(pool))]
    return lambda index: torch.autograd.grad(graphs[index], wanted[index], incoming[index], retain_graph=True)


def _is_float(argument: object) -> bool:
    return isinstance(argument, Tensor) and argument.is_floating_point()


def _problem(judgements: tuple[Judgement, ...]) -> str:
    return "; ".join(f"{j.quantity} {j.message}" for j in judgements if not j.passed)


def _about(job: Job, implementation: Implementation) -> dict[str, Any]:
    return {
        "operation": job.operation.name,
        "case": CaseRecord.of(job.case),
        "direction": job.direction.value,
        "implementation": implementation.name,
        "level": implementation.level.value,
    }


def _refusal(job: Job, implementation: Implementation, status: Status, reason: str) -> Measurement:
    return Measurement(**_about(job, implementation), status=status, reason=reason)


def _measurement(
    job: Job,
    implementation: Implementation,
    timings: dict[str, Timing],
    judgements: tuple[Judgement, ...],
    machine: Machine,
) -> Measurement:
    """Set one timing against the machine's limits and against every PyTorch level of the same rounds."""
    timing = timings[implementation.name]
    seconds = median_interval(timing.samples)
    cost = job.operation.cost(job.case, job.direction)
    attained = attain(cost.bytes, cost.flops, seconds.median, machine.ceilings, timing.pool_bytes, job.case.dtype_name)
    impossible = faster_than_physics(attained)
    baselines = [
        i.name
        for i in job.operation.implementations
        # Times of different methods are different quantities.
        if i.level in PYTORCH and i.name in timings and timings[i.name].method == timing.method
    ]
    return Measurement(
        **_about(job, implementation),
        status="rejected" if impossible else "measured",
        reason=impossible or "",
        seconds=IntervalRecord.of(seconds),
        samples=timing.samples,
        calls_per_sample=timing.calls_per_sample,
        method=timing.method,
        pool_bytes=timing.pool_bytes,
        bytes=cost.bytes,
        flops=cost.flops,
        bytes_per_second=attained.bytes_per_second,
        share_of_copy=attained.share_of_copy,
        share_of_matmul=attained.share_of_matmul,
        comparisons={
            name: ComparisonRecord.of(compare_paired(timings[name].samples, timing.samples))
            for name in baselines
            if name != implementation.name
        },
        relative_error=max(j.relative_error for j in judgements),
        error_over_budget=max(j.error_over_budget for j in judgements),
    )
