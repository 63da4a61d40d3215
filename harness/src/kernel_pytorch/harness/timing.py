"""One job: check every implementation, time it in turns with the others, and check it again."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

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
from kernel_pytorch.harness.results import CaseRecord, Conditions, Measurement, Status
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


def _reusable_graphs(direction: Direction) -> contextlib.AbstractContextManager[Any]:
    """Timing a backward alone runs it again and again on one graph; buffers donated by torch.compile forbid that."""
    if direction is not Direction.BACKWARD:
        return contextlib.nullcontext()
    from torch._functorch import config

    return config.patch(donated_buffer=False)


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
    implementations, reasons = chosen(job, wanted), excluded or {}
    found = {i.name: crashed(job, i, reasons[i.name]) for i in implementations if i.name in reasons}
    run = JobRun(job, machine, device, rounds)
    with _reusable_graphs(job.direction):
        found |= run.check([i for i in implementations if i.name not in found], announce)
        announce("timing")
        if runnable := [i for i in implementations if i.name not in found]:
            try:
                run.time(runnable)
            except torch.OutOfMemoryError as error:
                largest = max(runnable, key=lambda i: run.peaks[i.name]).name
                announce(largest)  # the next attempt leaves it out
                why = str(error).partition(".")[0]
                raise RuntimeError(f"{TOO_LARGE}: a call takes {run.peaks[largest] / 2**30:.1f} GiB, {why}") from error
            found |= run.results(runnable)
    return [found[i.name] for i in implementations]


def chosen(job: Job, wanted: set[str] | None) -> list[Implementation]:
    """The implementations of a job's operation, or those of them that are wanted."""
    return [i for i in job.operation.implementations if wanted is None or i.name in wanted]


def crashed(job: Job, implementation: Implementation, reason: str) -> Measurement:
    """Return the record of an implementation that crashed, or was left out because of its memory."""
    status: Status = "unavailable" if TOO_LARGE in reason else "crashed"
    return _without_time(job, implementation, status, reason)


class JobRun:
    """A job while it is measured: `check`, then `time`, then `results`.

    Attributes:
        peaks: by the name of an implementation, bytes of GPU memory that its check took.
        timings: of the implementations, after `time`.
    """

    def __init__(self, job: Job, machine: Machine, device: torch.device, rounds: int) -> None:
        self.job, self.machine, self.device, self.rounds = job, machine, device, rounds
        self.cost = job.operation.cost(job.case, job.direction)
        self.backward = job.direction is not Direction.FORWARD
        self.errors: dict[str, float] = {}
        self.peaks: dict[str, int] = {}
        self.timings: dict[str, Timing] = {}

    def check(self, implementations: list[Implementation], announce: Callable[[str], None]) -> dict[str, Measurement]:
        """Return, by name, the records of what cannot be timed or is wrong.

        PyTorch's own levels and other libraries are timed even if they miss the budget.
        """
        if any(i.level is Level.COMPILE for i in implementations):  # Dynamo takes seconds to import
            torch._dynamo.reset()  # every job has a new shape; past eight torch.compile would give up
        job, found = self.job, {}
        expected = expect(job.operation, Trial(job.case, RANDOM), self.device)
        for i in implementations:
            announce(i.name)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            reason = job.operation.why_lacking(i.name, job.case)
            reason = reason or why_not_timed(job.technique, i, self.device, job.case.dtype)
            if reason is not None:
                found[i.name] = _without_time(job, i, "unavailable", reason)
                continue
            with watch_compiler() if i.level is Level.COMPILE else contextlib.nullcontext(lambda: "") as not_compiled:
                error_checks = examine(i, expected, backward=self.backward)
            self.errors[i.name] = max(j.error_over_budget for j in error_checks)
            self.peaks[i.name] = _peak_bytes(self.device)
            tolerated = i.level in BASELINES and math.isfinite(self.errors[i.name])
            problem = ("" if tolerated else _problem(error_checks)) or not_compiled()
            if reason := not_offered(i, error_checks):
                found[i.name] = _without_time(job, i, "unavailable", reason)
            elif problem:
                found[i.name] = _without_time(job, i, "wrong", problem)
        return found

    def time(self, implementations: list[Implementation]) -> None:
        """Time implementations in turns, with the yardsticks beside them."""
        per_set = max(1, self.cost.bytes)
        # Each implementation and the yardsticks hold outputs or graphs for every set, so they share the limit.
        limit = MEMORY_LIMIT[self.device.type] // (2 * (len(implementations) + 1))
        sets = sets_needed(per_set, self.device, memory_limit_bytes=limit)
        with on_clock_stream(self.device):
            self.workload = Workload.of(self.job, sets, self._generator(0))
            self.calls = {i.name: self.workload.timed_call(i) for i in implementations}
            beside = yardsticks(self.cost, self.job.case, sets, per_set, self.device)
        subjects = [*(Subject(name, call, sets, per_set) for name, call in self.calls.items()), *beside]
        with watching(reader_for(self.device)) as readings:
            self.timings = measure(subjects, self.device, rounds=self.rounds)
        self.trace = Trace(tuple(readings))

    def results(self, implementations: list[Implementation]) -> dict[str, Measurement]:
        """Check again after timing, and compare what is right with the machine and with every trusted baseline."""
        checked = self._check_again(implementations)
        impossible = {i.name: faster_than_physics(self._attained(self.timings[i.name])) for i in implementations}
        trusted = {
            i.name: self.timings[i.name]
            for i in implementations
            if i.level in BASELINES and not checked[i.name][1] and not impossible[i.name]
        }
        return {
            i.name: _without_time(self.job, i, "wrong", problem)
            if problem
            else self._measurement(i, impossible[i.name], trusted, error_checks)
            for i in implementations
            for error_checks, problem in [checked[i.name]]
        }

    def _check_again(self, implementations: list[Implementation]) -> dict[str, tuple[tuple[ErrorCheck, ...], str]]:
        """Judge again on fresh inputs and on the timed ones with new contents; return problems too."""
        after = expect(self.job.operation, Trial(self.job.case, RANDOM), self.device, seed=1)
        renewed = self.workload.renew(self._generator(2))
        found = {}

        def examined(i: Implementation, seed: int | None = None) -> tuple[ErrorCheck, ...]:
            nonlocal renewed
            if seed is not None:
                renewed = self.workload.renew(self._generator(seed))
            return self.workload.examine(i, self.calls[i.name], renewed)

        for i in implementations:
            fresh = examine(i, after, backward=self.backward)
            allowed = DRIFT * max(1.0, self.errors[i.name]) if i.level in BASELINES else 1.0
            if problem := _problem(fresh, allowed):
                problem = f"after timing, on fresh inputs: {problem}"
            elif problem := _problem(confirm(examined(i), functools.partial(examined, i, FRESH)), allowed):
                problem = f"the timed call, after its inputs changed in place: {problem}"
            found[i.name] = fresh, problem
        return found

    def _attained(self, timing: Timing) -> Attained:
        cost, seconds = self.cost, statistics.median(timing.samples)
        pool, dtype = timing.pool_bytes, self.job.case.dtype_name
        return attain(cost.bytes, cost.flops, seconds, self.machine.ceilings, pool, dtype)

    def _measurement(
        self,
        implementation: Implementation,
        impossible: str | None,
        trusted: Mapping[str, Timing],
        error_checks: tuple[ErrorCheck, ...],
    ) -> Measurement:
        timing = self.timings[implementation.name]
        attained = self._attained(timing)
        of_copy, of_products = (share(self.timings.get(name), timing) for name in (COPY, PRODUCTS))
        return Measurement(
            **_about(self.job, implementation),
            status="rejected" if impossible else "measured",
            reason=impossible or _problem(error_checks),
            seconds=median_interval(timing.samples),
            samples=timing.samples,
            calls_per_sample=timing.calls_per_sample,
            method=timing.method,
            pool_bytes=timing.pool_bytes,
            bytes=self.cost.bytes,
            flops=self.cost.flops,
            bytes_per_second=attained.bytes_per_second,
            share_of_copy=attained.share_of_copy if of_copy is None else of_copy,
            share_of_matmul=attained.share_of_matmul if of_products is None else of_products,
            same_size=of_copy is not None,
            comparisons={
                name: compare_paired(baseline.samples, timing.samples)
                for name, baseline in trusted.items()
                # Times of different methods are different quantities.
                if name != implementation.name and baseline.method == timing.method and not impossible
            },
            relative_error=max(j.relative_error for j in error_checks),
            error_over_budget=max(j.error_over_budget for j in error_checks),
            marked=tuple(index for index, moved in enumerate(marked(self.trace, timing.spans)) if moved),
            conditions=Conditions.of(self.trace),
        )

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)


def _peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _problem(error_checks: Iterable[ErrorCheck], allowed: float = 1.0) -> str:
    """Describe what is wrong, or ""; a miss whose error over its budget is at most `allowed` is ignored."""
    wrong = [j for j in error_checks if not j.passed and j.error_over_budget > allowed]
    return "; ".join(f"{j.quantity} {j.message}" for j in wrong)


def _without_time(job: Job, implementation: Implementation, status: Status, reason: str) -> Measurement:
    return Measurement(**_about(job, implementation), status=status, reason=reason)


def _about(job: Job, implementation: Implementation) -> dict[str, Any]:
    return {
        "operation": job.operation.name,
        "case": CaseRecord.of(job.case),
        "direction": job.direction.value,
        "implementation": implementation.name,
        "level": implementation.level.value,
    }
