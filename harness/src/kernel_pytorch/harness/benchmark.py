"""Benchmark a technique job by job; a crash is isolated from other jobs, and every finished job is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from kernel_pytorch.harness.api import check_names, find_technique, level_names, without_deprecations
from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.environment import now
from kernel_pytorch.harness.isolation import Announce, Worker
from kernel_pytorch.harness.machine import Ceilings, Machine, higher, measure_machine
from kernel_pytorch.harness.overheads import Call, cost_in_child
from kernel_pytorch.harness.peers import PEER_PREFIX
from kernel_pytorch.harness.provenance import identify
from kernel_pytorch.harness.results import BenchmarkRun, Measurement, Results, WholeCost
from kernel_pytorch.harness.technique import Direction, Technique
from kernel_pytorch.harness.timing import ROUNDS, chosen, crashed, run_job
from kernel_pytorch.harness.workload import QUICK_CASES, SHORT_CASES, Job, JobKey, find_job, jobs

QUICK_ROUNDS = 12


@dataclass(frozen=True)
class Plan:
    """The extent of a benchmark run.

    Attributes:
        levels: names of the implementations, or None for all. The reference and native always run: they are baselines.
        quick: fewer rounds, only the first cases of each operation.
        directions: passes to time, or None for those of each operation.
        overheads: measure host time, memory, compilation and launches too, on the first case of each operation.
        operations: names of the operations to measure, or None for all.
        cases: of a `quick` run, the number of cases of each operation.
    """

    levels: tuple[str, ...] | None = None
    quick: bool = False
    directions: tuple[Direction, ...] | None = None
    overheads: bool = False
    operations: tuple[str, ...] | None = None
    cases: int = QUICK_CASES

    @property
    def wanted(self) -> set[str] | None:
        """Implementations to run, or None for all."""
        return None if self.levels is None else {*self.levels, "reference", "native"}

    @property
    def rounds(self) -> int:
        """Rounds of the clock."""
        return QUICK_ROUNDS if self.quick else ROUNDS

    def jobs(self, technique: Technique, device: torch.device) -> list[Job]:
        """The jobs of one technique."""
        every = jobs(technique, device, first=self.cases if self.quick else None, directions=self.directions)
        return [job for job in every if self.operations is None or job.operation.name in self.operations]


SHORT = Plan(quick=True, cases=SHORT_CASES)
"""One case of each operation, fewer rounds: what `kernel-pytorch bench` measures without options."""


@without_deprecations()
def bench(
    name: str | Technique,
    plan: Plan = SHORT,
    *,
    device: torch.device | str | None = None,
    machine: Machine | None = None,
    worker: Worker | None = None,
    previous: Results | None = None,
    on_job: Callable[[str], None] = lambda label: None,
    on_progress: Callable[[Results], None] = lambda results: None,
    again: Callable[[], Ceilings] | None = None,
) -> Results:
    """Time every level of a technique's public functions, in turns, inputs cold, outputs checked before and after.

    Args:
        name: of an installed technique, as `kernel-pytorch list` prints it, or its declaration.
        plan: what to measure; `Plan()` is what `kernel-pytorch bench --full` measures.
        device: cpu, cuda or cuda:1; CUDA where there is a GPU if None.
        machine: the limits that shares are of; measured now, which takes some seconds, if None.
        worker: process that the jobs run in, so that a crash is isolated from other jobs; None for this process.
        previous: earlier results of the same code, see `why_not_resumed`. All of it is kept, also what this plan does
            not ask for or has not reached yet.
        on_job: called with the label of each job before it starts.
        on_progress: called after each job with the results so far, marked as not complete.
        again: measures the ceilings again before a result is rejected for exceeding them, because the machine may have
            been busy the first time; the higher ones hold from then on. Called once at most for each job. None if the
            ceilings are given.

    Returns:
        Seconds are medians with intervals; after Ctrl-C what stood by then, marked as not complete.

    Raises:
        UserError: no such technique, level, operation or device; the message lists those that exist.
    """
    where, technique = parse_device(None if device is None else str(device)), find_technique(name)
    check_names(technique.name, "level", plan.levels, level_names(technique.operations))
    check_names(technique.name, "operation", plan.operations, [o.name for o in technique.operations])
    machine = machine or measure_machine(where, quick=plan.quick)
    known = {} if previous is None else by_job(previous)
    earlier = () if previous is None else previous.runs or (_run_on(previous.machine, previous.created),)
    order = [job.key for job in jobs(technique, where, directions=tuple(Direction))]
    results = Results(
        technique=technique.name,
        created=now(),
        quick=plan.quick,
        complete=False,
        machine=machine,
        identities=identify(technique, machine.environment, compiling=not plan.quick),
        runs=(*earlier, _run_on(machine, now())),
        measurements=tuple(m for key in order for m in known.get(key, ())),
        costs=() if previous is None else previous.costs,
    )
    try:
        # Jobs without any record go first.
        for job in sorted(plan.jobs(technique, where), key=lambda job: job.key in known):
            on_job(job.label)
            held = {m.implementation for m in known.get(job.key, ())}
            if not {i.name for i in chosen(job, plan.wanted)} <= held:
                found, machine = _measured(job, machine, where, plan, held, worker, again)
                known[job.key] = [m.model_copy(update={"run": len(earlier)}) for m in found]
            measurements = tuple(m for key in order for m in known.get(key, ()))
            results = results.model_copy(update={"created": now(), "machine": machine, "measurements": measurements})
            on_progress(results)
        if plan.overheads:
            costs = _costs(technique, where, plan, worker, on_job, results)
            results = results.model_copy(update={"created": now(), "costs": costs})
    except KeyboardInterrupt:
        return results
    return results.model_copy(update={"complete": True})


def why_not_resumed(previous: Results, technique: Technique, machine: Machine, plan: Plan) -> str | None:
    """Why an interrupted run cannot be continued, or None: device, torch, plan and all code must be the same."""
    before, now = previous.machine.environment, machine.environment
    if before.device_name != now.device_name:
        return f"it was measured on {before.device_name}"
    if (before.torch, before.triton) != (now.torch, now.triton):
        return f"it was measured with torch {before.torch} and triton {before.triton}"
    if previous.quick != plan.quick:
        return "it was a short run" if previous.quick else "it was a full run"
    present = identify(technique, now, compiling=not plan.quick)
    labels = {f"{m.operation}/{m.implementation}" for m in previous.measurements if m.status == "measured"}
    ours = sorted(label for label in labels if not label.partition("/")[2].startswith(PEER_PREFIX))
    changed = [label for label in ours if label not in present or previous.identities.get(label) != present[label]]
    return f"the code of {changed[0]} has changed, or is not known" if changed else None


def by_job(results: Results) -> dict[JobKey, list[Measurement]]:
    """Group measurements by the key of their job."""
    found: dict[JobKey, list[Measurement]] = {}
    for m in results.measurements:
        found.setdefault((results.technique, m.operation, m.case.label, m.direction), []).append(m)
    return found


def _run_on(machine: Machine, created: str) -> BenchmarkRun:
    about = {name: getattr(machine.environment, name) for name in ("commit", "dirty", "torch", "triton")}
    return BenchmarkRun(created=created, **about)


def _measured(
    job: Job,
    machine: Machine,
    device: torch.device,
    plan: Plan,
    held: Iterable[str],
    worker: Worker | None,
    again: Callable[[], Ceilings] | None,
) -> tuple[list[Measurement], Machine]:
    """Run a job, and once more where the ceilings reject something; those that take turns are measured together."""
    if plan.levels is not None:
        plan = dataclasses.replace(plan, levels=(*plan.levels, *sorted(held)))
    found = _run_job(job, machine, device, plan, worker)
    if again is not None and any(m.status == "rejected" for m in found):
        machine = machine.model_copy(update={"ceilings": higher(machine.ceilings, again())})
        found = _run_job(job, machine, device, plan, worker)
    return found, machine


def _run_job(job: Job, machine: Machine, device: torch.device, plan: Plan, worker: Worker | None) -> list[Measurement]:
    """Run a job; while it crashes, run it again without the implementation that was running."""
    if worker is None:
        return run_job(job, machine, device, plan.wanted, rounds=plan.rounds)
    excluded: dict[str, str] = {}
    while True:
        outcome = worker.call(_run_in_child, job.key, machine, device, plan, excluded)
        if not outcome.failure:
            return outcome.value
        names = [i.name for i in chosen(job, plan.wanted)]
        if outcome.stage not in names or outcome.stage in excluded:
            # It died while all took turns, so the culprit is unknown.
            why = f"while {outcome.stage or 'starting'}: {outcome.failure}"
            return [crashed(job, i, excluded.get(i.name, why)) for i in chosen(job, plan.wanted)]
        excluded[outcome.stage] = outcome.failure


def _run_in_child(
    key: JobKey, machine: Machine, device: torch.device, plan: Plan, excluded: dict[str, str], announce: Announce
) -> list[Measurement]:
    wanted, rounds = plan.wanted, plan.rounds
    return run_job(find_job(key, device), machine, device, wanted, rounds=rounds, excluded=excluded, announce=announce)


def _costs(
    technique: Technique,
    device: torch.device,
    plan: Plan,
    worker: Worker | None,
    on_job: Callable[[str], None],
    results: Results,
) -> tuple[WholeCost, ...]:
    """The overheads of every implementation on the first case of its operation, and what is known of others."""
    every = {(cost.operation, cost.implementation): cost for cost in results.costs}
    declared = [(operation, i) for operation in technique.operations for i in operation.implementations]
    for operation, i in declared:
        if operation.name not in (plan.operations or [operation.name]) or i.name not in (plan.wanted or [i.name]):
            continue
        call = Call(technique, operation, i, operation.bench_grid.cases(device.type)[0], device)
        on_job(f"overheads of {operation.name} {i.name}")
        if worker is None:
            cost = call.cost()
        else:
            outcome = worker.call(cost_in_child, *call.names)
            cost = outcome.value or call.no_cost(outcome.failure)
        new = call.with_starts(cost).model_copy(update={"run": len(results.runs) - 1})
        every[operation.name, i.name] = new
    names = [(operation.name, i.name) for operation, i in declared]
    return tuple(every[name] for name in sorted(every, key=lambda n: names.index(n) if n in names else len(names)))
