"""Verification and benchmarks from Python: what the commands `verify` and `bench` print, as records."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch

from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.benchmark import Plan, benchmark
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.isolation import Worker, Workers
from kernel_pytorch.harness.machine import Ceilings, Machine, measure_machine
from kernel_pytorch.harness.results import Results, VerificationReport
from kernel_pytorch.harness.technique import Operation
from kernel_pytorch.harness.verification import Verification, report
from kernel_pytorch.harness.verification import verify as verify_technique
from kernel_pytorch.harness.workload import SHORT_CASES

SHORT = Plan(quick=True, cases=SHORT_CASES)
"""One case of each operation, fewer rounds: what `kernel-pytorch bench` measures without options."""


def verify(
    name: str,
    *,
    levels: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    exhaustive: bool = False,
    workers: Workers | None = None,
    on_trial: Callable[[Verification], None] = lambda verification: None,
) -> VerificationReport:
    """Check every level of a technique's public functions against the definition in float64.

    Forward and gradients, on awkward and adversarial inputs; the rules are those of `kernel_pytorch.harness.oracle`.
    Each of the report's `levels` lists its `failures`.

    Args:
        name: of an installed technique, as `kernel-pytorch list` prints it.
        levels: names of the levels to check; all of them if None.
        device: cpu, cuda or cuda:1; CUDA where there is a GPU if None.
        exhaustive: run torch.compile on every case too, not on the core cases alone.
        workers: processes that the cases run in, so that one that crashes costs itself alone; None for this process.
        on_trial: called with each verification when it is done.

    Raises:
        UserError: no such technique, level or device; the message lists those that exist.
    """
    where, technique = parse_device(None if device is None else str(device)), discover().get(name)
    check_names(technique.name, "level", levels, level_names(technique.operations))
    chosen = None if levels is None else list(levels)
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.*deprecated")
        for verification in verify_technique(technique, where, levels=chosen, exhaustive=exhaustive, workers=workers):
            found.append(verification)
            on_trial(verification)
    return report(technique, found, where)


def bench(
    name: str,
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
        name: of an installed technique, as `kernel-pytorch list` prints it.
        plan: what to measure; `Plan()` is what `kernel-pytorch bench --full` measures.
        machine: the limits that shares are of; measured now, which takes some seconds, if None.
        worker: as `workers` in `verify`.
        previous: as in `kernel_pytorch.harness.benchmark.benchmark`, and so are the rest.
        on_job: called with the label of each job before it starts.
        on_progress: called with the results so far after each job.
        again: measures the ceilings once more before anything is rejected by them.

    Returns:
        Seconds are medians with intervals; after Ctrl-C what stood by then, marked as not complete.

    Raises:
        UserError: no such technique, level, operation or device; the message lists those that exist.
    """
    where, technique = parse_device(None if device is None else str(device)), discover().get(name)
    check_names(technique.name, "level", plan.levels, level_names(technique.operations))
    check_names(technique.name, "operation", plan.operations, [o.name for o in technique.operations])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.*deprecated")
        return benchmark(
            technique,
            machine or measure_machine(where, quick=plan.quick),
            where,
            plan,
            worker=worker,
            previous=previous,
            on_job=on_job,
            on_progress=on_progress,
            again=again,
        )


def level_names(operations: Iterable[Operation]) -> list[str]:
    """Names of all levels and peers, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable([i.name for i in o.implementations] for o in operations)))


def check_names(owner: str, what: str, given: Sequence[str] | None, known: Sequence[str]) -> None:
    """Raise TypeError for a string instead of a list of names, UserError for a name that does not exist."""
    if isinstance(given, str):
        raise TypeError(f"{what}s: given {given!r}; allowed is a list of names, such as [{given!r}]")
    for each in given or ():
        if each not in known:
            raise UserError(f"{owner} has no {what} {each!r}; there are: {', '.join(known)}")
