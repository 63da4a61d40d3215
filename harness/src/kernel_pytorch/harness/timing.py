"""One job: check every implementation, time it in turns with the others, and check it again."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.availability import why_not_timed
from kernel_pytorch.harness.clock import (
    Subject,
    Timing,
    compare_paired,
    measure,
    median_interval,
    on_clock_stream,
    sets_needed,
)
from kernel_pytorch.harness.launches import watch_compiler
from kernel_pytorch.harness.machine import Attained, Machine, attain, faster_than_physics
from kernel_pytorch.harness.noise import Trace, marked, reader_for, watching
from kernel_pytorch.harness.oracle import ErrorCheck, confirm
from kernel_pytorch.harness.results import (
    CaseRecord,
    Conditions,
    Measurement,
    Status,
)
from kernel_pytorch.harness.technique import Direction, Implementation, Level
from kernel_pytorch.harness.trials import RANDOM, Trial
from kernel_pytorch.harness.verification import FRESH, examine, expect, not_offered
from kernel_pytorch.harness.workload import COPY, PRODUCTS, Job, Workload, share, yardsticks

ROUNDS = 30
TOO_LARGE = "needs the most memory of all that take turns"
"""Start of the reason for leaving out an implementation so that the others fit into GPU memory."""
MEMORY_LIMIT = {"cpu": 2 * 2**30, "cuda": 24 * 2**30}  # bytes for all input sets of one case
BASELINES = (Level.REFERENCE, Level.NATIVE, Level.TORCHSCRIPT, Level.COMPILE, Level.PEER)
DRIFT = 2.0
"""How many times as far off as before it was timed an implementation may be afterwards, on other random numbers."""


@contextlib.contextmanager
def _reusable_graphs(direction: Direction) -> Iterator[None]:
    """Timing a backward alone runs it again and again on one graph; buffers donated by torch.compile forbid that."""
    if direction is Direction.BACKWARD:
        from torch._functorch import config

        with config.patch(donated_buffer=False):
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
    excluded: Mapping[str, str] | None = None,
    announce: Callable[[str], None] = lambda stage: None,
) -> list[Measurement]:
    """Check, time, check again on fresh inputs, and compare with the limits of the machine.

    Args:
        job: what to measure.
        machine: the ceilings to compare with.
        device: where.
        wanted: names of the implementations, or None for all.
        rounds: of the clock.
        excluded: implementations that crashed in an earlier attempt, with what happened; they are not run again.
        announce: called with the name of each implementation before it runs for the first time, then with "timing".
    """
    implementations = chosen(job, wanted)
    with _reusable_graphs(job.direction):
        found = _check_and_time(job, machine, device, implementations, rounds, excluded or {}, announce)
    return [found[i.name] for i in implementations]


def chosen(job: Job, wanted: set[str] | None) -> list[Implementation]:
    """The implementations of a job's operation, or those of them that are wanted."""
    return [i for i in job.operation.implementations if wanted is None or i.name in wanted]


def crashed(job: Job, implementation: Implementation, reason: str) -> Measurement:
    """Return the record of an implementation that crashed, or was left out because of its memory."""
    return _refusal(job, implementation, "unavailable" if TOO_LARGE in reason else "crashed", reason)


def _check_and_time(
    job: Job,
    machine: Machine,
    device: torch.device,
    implementations: list[Implementation],
    rounds: int,
    excluded: Mapping[str, str],
    announce: Callable[[str], None],
) -> dict[str, Measurement]:
    found = {i.name: crashed(job, i, excluded[i.name]) for i in implementations if i.name in excluded}
    refusals, errors_before, peaks = _check(job, device, [i for i in implementations if i.name not in found], announce)
    found |= refusals
    runnable = [i for i in implementations if i.name not in found]
    announce("timing")
    if not runnable:
        return found
    try:
        measured = _time(job, runnable, device, rounds)
    except torch.OutOfMemoryError as error:
        largest = max(runnable, key=lambda i: peaks[i.name]).name
        announce(largest)  # the next attempt leaves it out
        why = str(error).partition(".")[0]
        raise RuntimeError(f"{TOO_LARGE}: a call takes {peaks[largest] / 2**30:.1f} GiB, {why}") from error
    checked = _check_again(job, runnable, measured, device, errors_before)
    trusted = {
        name: timing
        for name, timing in measured.timings.items()
        if not checked[name][1] and not faster_than_physics(_attained(job, timing, machine))
    }
    for implementation in runnable:
        error_checks, problem = checked[implementation.name]
        if problem:
            found[implementation.name] = _refusal(job, implementation, "wrong", problem)
        else:
            found[implementation.name] = _measurement(job, implementation, measured, trusted, error_checks, machine)
    return found


def _check(
    job: Job, device: torch.device, implementations: list[Implementation], announce: Callable[[str], None]
) -> tuple[dict[str, Measurement], dict[str, float], dict[str, int]]:
    """Return, by name, the records of what cannot be timed or is wrong, and worst error and peak memory of the others.

    PyTorch's own levels and other libraries are timed even if they miss the budget.
    """
    if any(
        i.level is Level.COMPILE for i in implementations
    ):  # otherwise Dynamo need not be imported, which takes seconds
        torch._dynamo.reset()  # every job has a new shape; past eight torch.compile would give up
    expected = expect(job.operation, Trial(job.case, RANDOM), device)
    found, errors, peaks = {}, {}, {}
    for implementation in implementations:
        announce(implementation.name)
        _reset_peak(device)
        reason = job.operation.why_lacking(implementation.name, job.case)
        reason = reason or why_not_timed(job.technique, implementation, device, job.case.dtype)
        if reason is not None:
            found[implementation.name] = _refusal(job, implementation, "unavailable", reason)
            continue
        is_compiled = implementation.level is Level.COMPILE
        with watch_compiler() if is_compiled else contextlib.nullcontext(lambda: "") as not_compiled:
            error_checks = examine(implementation, expected, backward=job.direction is not Direction.FORWARD)
        errors[implementation.name] = max(j.error_over_budget for j in error_checks)
        peaks[implementation.name] = _peak_bytes(device)
        tolerated = implementation.level in BASELINES and math.isfinite(errors[implementation.name])
        problem = ("" if tolerated else _problem(error_checks)) or not_compiled()
        if reason := not_offered(implementation, error_checks):
            found[implementation.name] = _refusal(job, implementation, "unavailable", reason)
        elif problem:
            found[implementation.name] = _refusal(job, implementation, "wrong", problem)
    return found, errors, peaks


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


@dataclass(frozen=True)
class _Measured:
    """Timings of the implementations of a job, and the workload that they were timed on."""

    workload: Workload
    calls: dict[str, Callable[[int], tuple[Tensor, ...]]]
    timings: dict[str, Timing]
    beside: dict[str, Timing]
    trace: Trace


def _time(job: Job, implementations: list[Implementation], device: torch.device, rounds: int) -> _Measured:
    cost = job.operation.cost(job.case, job.direction)
    per_set = max(1, cost.bytes)
    # Each implementation and the yardsticks hold outputs or graphs for every set, so they share the limit.
    limit = MEMORY_LIMIT[device.type] // (2 * (len(implementations) + 1))
    sets = sets_needed(per_set, device, memory_limit_bytes=limit)
    with on_clock_stream(device):
        workload = Workload.of(job, sets, torch.Generator(device).manual_seed(0))
        calls = {i.name: workload.timed_call(i) for i in implementations}
        beside = yardsticks(cost, job.case, sets, per_set, device)
    subjects = [*(Subject(name, call, sets, per_set) for name, call in calls.items()), *beside]
    with watching(reader_for(device)) as readings:
        timings = measure(subjects, device, rounds=rounds)
    others = {subject.name: timings.pop(subject.name) for subject in beside}
    return _Measured(workload, calls, timings, others, Trace(tuple(readings)))


def _check_again(
    job: Job,
    implementations: list[Implementation],
    measured: _Measured,
    device: torch.device,
    errors_before: Mapping[str, float],
) -> dict[str, tuple[tuple[ErrorCheck, ...], str]]:
    """Judge again after timing, on fresh inputs and on the timed ones with new contents; return problems too."""
    after = expect(job.operation, Trial(job.case, RANDOM), device, seed=1)
    renewed = [measured.workload.renew(torch.Generator(device).manual_seed(2))]
    found = {}

    def examine_timed(i: Implementation) -> list[ErrorCheck]:
        def again() -> tuple[ErrorCheck, ...]:
            renewed[0] = measured.workload.renew(torch.Generator(device).manual_seed(FRESH))
            return measured.workload.examine(i, measured.calls[i.name], renewed[0])

        return confirm(measured.workload.examine(i, measured.calls[i.name], renewed[0]), again)

    for i in implementations:
        fresh = examine(i, after, backward=job.direction is not Direction.FORWARD)
        allowed = DRIFT * max(1.0, errors_before[i.name]) if i.level in BASELINES else 1.0
        problem = _problem(fresh, allowed)
        if problem:
            problem = f"after timing, on fresh inputs: {problem}"
        elif problem := _problem(examine_timed(i), allowed):
            problem = f"the timed call, after its inputs changed in place: {problem}"
        found[i.name] = fresh, problem
    return found


def _problem(error_checks: Iterable[ErrorCheck], allowed: float = 1.0) -> str:
    """Describe what is wrong, or ""; misses up to `allowed`, the error over its budget, are not."""
    wrong = [j for j in error_checks if not j.passed and j.error_over_budget > allowed]
    return "; ".join(f"{j.quantity} {j.message}" for j in wrong)


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


def _attained(job: Job, timing: Timing, machine: Machine) -> Attained:
    """Compare one timing with the limits of the machine."""
    cost, seconds = job.operation.cost(job.case, job.direction), statistics.median(timing.samples)
    return attain(cost.bytes, cost.flops, seconds, machine.ceilings, timing.pool_bytes, job.case.dtype_name)


def _measurement(
    job: Job,
    implementation: Implementation,
    measured: _Measured,
    trusted: dict[str, Timing],
    error_checks: tuple[ErrorCheck, ...],
    machine: Machine,
) -> Measurement:
    """Compare one timing with the limits of the machine and every trusted level of PyTorch and other libraries."""
    timing = measured.timings[implementation.name]
    cost = job.operation.cost(job.case, job.direction)
    attained = _attained(job, timing, machine)
    impossible = faster_than_physics(attained)
    of_copy, of_products = (share(measured.beside.get(name), timing) for name in (COPY, PRODUCTS))
    baselines = [
        i.name
        for i in job.operation.implementations
        # Times of different methods are different quantities.
        if i.level in BASELINES and i.name in trusted and trusted[i.name].method == timing.method
    ]
    return Measurement(
        **_about(job, implementation),
        status="rejected" if impossible else "measured",
        reason=impossible or _problem(error_checks),
        seconds=median_interval(timing.samples),
        samples=timing.samples,
        calls_per_sample=timing.calls_per_sample,
        method=timing.method,
        pool_bytes=timing.pool_bytes,
        bytes=cost.bytes,
        flops=cost.flops,
        bytes_per_second=attained.bytes_per_second,
        share_of_copy=attained.share_of_copy if of_copy is None else of_copy.median,
        share_of_matmul=attained.share_of_matmul if of_products is None else of_products.median,
        same_size=of_copy is not None,
        comparisons={
            name: compare_paired(trusted[name].samples, timing.samples)
            for name in baselines
            if name != implementation.name and not impossible
        },
        relative_error=max(j.relative_error for j in error_checks),
        error_over_budget=max(j.error_over_budget for j in error_checks),
        marked=tuple(index for index, moved in enumerate(marked(measured.trace, timing.spans)) if moved),
        conditions=Conditions.of(measured.trace),
    )
