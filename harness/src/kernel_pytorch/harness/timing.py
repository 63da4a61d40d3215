"""One job: every implementation proven right, timed in turns with the others, and proven right again."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping
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
from kernel_pytorch.harness.jobs import Job
from kernel_pytorch.harness.machine import Machine
from kernel_pytorch.harness.oracle import Judgement
from kernel_pytorch.harness.results import CaseRecord, ComparisonRecord, IntervalRecord, Measurement, Status
from kernel_pytorch.harness.roofline import Attained, attain, faster_than_physics
from kernel_pytorch.harness.technique import Direction, Implementation, Level
from kernel_pytorch.harness.verification import RANDOM, Trial, examine, standard

ROUNDS = 30
MEMORY_LIMIT = {"cpu": 2 * 2**30, "cuda": 24 * 2**30}  # bytes for all input sets of one case
PYTORCH = (Level.REFERENCE, Level.NATIVE, Level.TORCHSCRIPT, Level.COMPILE)


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
    """Check, time, check again on fresh inputs, and set against the machine's limits.

    Args:
        job: what to measure.
        machine: the ceilings to hold the figures against.
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
    """The record of an implementation that did not survive its case."""
    return _refusal(job, implementation, "crashed", reason)


def _check_and_time(
    job: Job,
    machine: Machine,
    device: torch.device,
    implementations: list[Implementation],
    rounds: int,
    excluded: Mapping[str, str],
    announce: Callable[[str], None],
) -> dict[str, Measurement]:
    backward = job.direction is not Direction.FORWARD
    found = {i.name: crashed(job, i, excluded[i.name]) for i in implementations if i.name in excluded}
    if any(i.level is Level.COMPILE for i in implementations):  # importing Dynamo takes seconds
        torch._dynamo.reset()  # every job has a new shape; past eight torch.compile would give up
    before = standard(job.operation, Trial(job.case, RANDOM), device)
    for implementation in implementations:
        if implementation.name in found:
            continue
        announce(implementation.name)
        reason = why_not_timed(job.technique, implementation, device, job.case.dtype)
        if reason is not None:
            found[implementation.name] = _refusal(job, implementation, "unavailable", reason)
        elif problem := _problem(examine(implementation, before, backward=backward)):
            found[implementation.name] = _refusal(job, implementation, "wrong", problem)
    runnable = [i for i in implementations if i.name not in found]
    announce("timing")
    timings = _time(job, runnable, device, rounds) if runnable else {}
    after = standard(job.operation, Trial(job.case, RANDOM), device, seed=1)
    checked = {i.name: examine(i, after, backward=backward) for i in runnable}
    trusted = {
        name: timing
        for name, timing in timings.items()
        if not _problem(checked[name]) and not faster_than_physics(_attained(job, timing, machine))
    }
    for implementation in runnable:
        name = implementation.name
        if problem := _problem(checked[name]):
            problem = f"after timing, on fresh inputs: {problem}"
            found[name] = _refusal(job, implementation, "wrong", problem)
        else:
            found[name] = _measurement(job, implementation, timings[name], trusted, checked[name], machine)
    return found


def _time(
    job: Job,
    implementations: list[Implementation],
    device: torch.device,
    rounds: int,
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
    return measure(subjects, device, rounds=rounds)


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


def _attained(job: Job, timing: Timing, machine: Machine) -> Attained:
    """Set one timing against the machine's limits."""
    cost, seconds = job.operation.cost(job.case, job.direction), statistics.median(timing.samples)
    return attain(cost.bytes, cost.flops, seconds, machine.ceilings, timing.pool_bytes, job.case.dtype_name)


def _measurement(
    job: Job,
    implementation: Implementation,
    timing: Timing,
    trusted: dict[str, Timing],
    judgements: tuple[Judgement, ...],
    machine: Machine,
) -> Measurement:
    """Set one timing beside the machine's limits and every trusted PyTorch level of the same rounds."""
    cost = job.operation.cost(job.case, job.direction)
    attained = _attained(job, timing, machine)
    impossible = faster_than_physics(attained)
    baselines = [
        i.name
        for i in job.operation.implementations
        # Times of different methods are different quantities.
        if i.level in PYTORCH and i.name in trusted and trusted[i.name].method == timing.method
    ]
    return Measurement(
        **_about(job, implementation),
        status="rejected" if impossible else "measured",
        reason=impossible or "",
        seconds=IntervalRecord.of(median_interval(timing.samples)),
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
            name: ComparisonRecord.of(compare_paired(trusted[name].samples, timing.samples))
            for name in baselines
            if name != implementation.name and not impossible
        },
        relative_error=max(j.relative_error for j in judgements),
        error_over_budget=max(j.error_over_budget for j in judgements),
    )
