"""`kernel-pytorch bench`: how fast is every level, of what the machine can do?"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape

from kernel_pytorch.harness.api import bench, level_names
from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.benchmark import Plan, by_job, why_not_resumed
from kernel_pytorch.harness.commands.common import (
    PLAIN,
    DeviceOption,
    LevelOption,
    OperationOption,
    PeersOption,
    Steps,
    TechniqueArgument,
    check_levels,
    check_operations,
    check_writable,
    load_peers,
    messages,
    output,
    warn_broken,
    warn_if_busy,
)
from kernel_pytorch.harness.commands.report import draw, show_heading, show_rest, show_tables
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.isolation import Worker
from kernel_pytorch.harness.jobs import QUICK_CASES, SHORT_CASES, JobKey
from kernel_pytorch.harness.machine import Ceilings, Machine, measure_ceilings, measure_machine
from kernel_pytorch.harness.results import Measurement, Results, load
from kernel_pytorch.harness.technique import Direction, Level, Technique

CASE_TIMEOUT = 600.0

NOT_WRITTEN = (
    "A short run: its tables are printed and not written. --json FILE or --out FOLDER writes them; --full measures"
    " every case and writes results/<device>/."
)
NOT_WRITTEN_PART = "A part of a full run: its tables are printed; --json FILE or --out FOLDER writes them."


QuickOption = Annotated[bool, typer.Option("--quick", help="Only the first operation of each technique: a first look.")]
FullOption = Annotated[bool, typer.Option("--full", help="Every case and every round, written into results/<device>/.")]
DirectionOption = Annotated[
    list[Direction] | None,
    typer.Option("--direction", help="Only this pass. May be given several times; forward and backward if omitted."),
]
WholeCostOption = Annotated[
    bool,
    typer.Option("--whole-cost", help="Also measure host time, memory, compilation and launches, which takes longer."),
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write the results to this file (one technique) or folder."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Write the results into <out>/<device>/. With --full: results, if omitted."),
]
MachineOption = Annotated[
    Path | None,
    typer.Option("--machine", help="Use this record of `kernel-pytorch machine --json` instead of measuring."),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run instead of beginning anew.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=1.0, help="Seconds after which a case counts as hanging.")
]


def bench_command(
    technique: TechniqueArgument = None,
    quick: QuickOption = False,
    full: FullOption = False,
    level: LevelOption = None,
    operation: OperationOption = None,
    device: DeviceOption = None,
    direction: DirectionOption = None,
    peers: PeersOption = None,
    whole_cost: WholeCostOption = False,
    json: JsonOption = None,
    out: OutOption = None,
    machine: MachineOption = None,
    resume: ResumeOption = False,
    timeout: TimeoutOption = CASE_TIMEOUT,
) -> None:
    """Time every level on shapes of published models, implementations interleaved, inputs cold, outputs checked.

    Without options it is a short run: one case of each operation, fewer rounds, the cheapest technique first. Its
    tables are printed; it is written only where --json or --out says. --quick measures two cases of the first operation
    of each technique. --full measures every case and writes
    results/<device>/<technique>.json with plots beside it; a part of it (--level, --operation, --direction) is written
    only where --json or --out says. A short run never replaces a full one. What was measured is kept after every case
    of a run that is written: Ctrl-C loses nothing, --resume continues. A case that crashes is isolated from the others.
    PyTorch's own levels and other libraries are timed although they miss the error budget, and shown with their error.

    Exit code: 0; 1 if a level of ours is wrong, or anything crashed or was faster than this machine can be; 2 for a
    name or an option that does not exist or cannot be obeyed; 130 after Ctrl-C.
    """
    where = parse_device(device)
    prepare = load_peers(peers)
    discovery = discover()
    techniques = discovery.select(technique)
    levels, operations = check_levels(level, techniques), check_operations(operation, techniques)
    warn_broken(discovery)
    if not techniques:
        messages.print("No technique is installed, so there is nothing to measure.")
        raise typer.Exit(1)
    _check_options(quick=quick, full=full, json=json, out=out)
    wanted, of = (None if names is None else tuple(names) for names in (levels, operations))
    cases = QUICK_CASES if quick else SHORT_CASES
    plan = Plan(wanted, not full, tuple(direction or ()) or None, whole_cost, of, cases)
    plans = {t.name: _plan_for(t, plan, first=quick and of is None) for t in techniques}
    if out is None and full and levels is operations is direction is None:
        out = Path("results")
    known = None if machine is None else Machine.load(machine)
    targets = _targets(techniques, json, out, known.slug if known else describe_environment(where).slug, full=full)
    warn_if_busy()
    if json is None and out is None:
        messages.print(NOT_WRITTEN if not full else NOT_WRITTEN_PART, **PLAIN)
    ceilings = known or _measure_machine(where, quick=not full)
    again = None if known else partial(measure_ceilings, where, quick=not full)
    with Worker(timeout, prepare) as worker:
        in_order = sorted(techniques, key=lambda t: _cost(t, where, plans[t.name]))
        if _measure_all(in_order, ceilings, where, plans, worker, targets, resume=resume, again=again):
            raise typer.Exit(1)


def _measure_all(
    techniques: list[Technique],
    machine: Machine,
    device: torch.device,
    plans: dict[str, Plan],
    worker: Worker,
    targets: dict[str, Path | None],
    *,
    resume: bool,
    again: Callable[[], Ceilings] | None,
) -> bool:
    """Measure one technique after the other, with tables and files; whether any has failed.

    A machine that turns out to be faster than was measured is that to all that follow.
    """
    refused = False
    for technique in techniques:
        name = technique.name
        results = _measure(technique, machine, device, plans[name], worker, targets[name], resume=resume, again=again)
        machine = results.machine
        show_rest(results)
        _save(results, targets[name])
        refused |= any(map(_fails, results.measurements))
        if not results.complete:
            raise typer.Exit(130)
    return refused


def _targets(
    techniques: list[Technique], json: Path | None, out: Path | None, slug: str, *, full: bool
) -> dict[str, Path | None]:
    """By technique, where its results go; checked before anything is measured."""
    found = {t.name: _target(json, out, slug, t, one=len(techniques) == 1) for t in techniques}
    for target in found.values():
        _check_target(target, full=full)
    return found


def _plan_for(technique: Technique, plan: Plan, *, first: bool) -> Plan:
    """What a plan for all techniques asks of one: the levels and operations that it has, or its first operation."""
    names = tuple(o.name for o in technique.operations)
    operations = names[:1] if first else None if plan.operations is None else _both(names, plan.operations)
    levels = None if plan.levels is None else _both(level_names(technique.operations), plan.levels)
    return replace(plan, operations=operations, levels=levels)


def _both(known: Iterable[str], wanted: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in known if name in wanted)


def _cost(technique: Technique, device: torch.device, plan: Plan) -> int:
    """Bytes and FLOPs of all jobs: the first table is to come soon."""
    costs = [job.operation.cost(job.case, job.direction) for job in plan.jobs(technique, device)]
    return sum(cost.bytes + cost.flops for cost in costs)


def _check_options(*, quick: bool, full: bool, json: Path | None, out: Path | None) -> None:
    """End with one line where options contradict each other."""
    for given, first, second in ((quick and full, "--quick", "--full"), (json and out, "--json", "--out")):
        if given:
            raise UserError(f"{first} and {second}: give one of them")


def _check_target(target: Path | None, *, full: bool) -> None:
    """End with one line, before anything is measured, if results could not or must not be written there."""
    check_writable(target)
    if target is None or full or not target.is_file():
        return
    try:
        is_quick = load(target).quick
    except UserError:
        return
    if not is_quick:
        raise UserError(f"{target} holds a full run, which only --full replaces; give another --json or --out")


def _fails(m: Measurement) -> bool:
    """Whether the run has failed by this: a wrong level of ours, or one that could not be measured."""
    if m.status == "wrong":
        return m.level in (Level.TRITON.value, Level.CUDA.value)
    return m.status in ("rejected", "crashed") and m.level != Level.PEER.value


def _measure_machine(device: torch.device, *, quick: bool) -> Machine:
    with Steps("measuring the machine") as step:
        return measure_machine(device, quick=quick, on_step=step)


def _measure(
    technique: Technique,
    machine: Machine,
    device: torch.device,
    plan: Plan,
    worker: Worker,
    target: Path | None,
    *,
    resume: bool,
    again: Callable[[], Ceilings] | None,
) -> Results:
    previous = _previous(technique, machine, plan, target) if resume else None

    shown: set[JobKey] = set()
    total = len(plan.jobs(technique, device)) + (not plan.quick)
    on_job = Steps(technique.name, total)

    def keep(results: Results) -> None:
        """Print what is new, so that the first table comes soon, and save."""
        new = {key: found for key, found in by_job(results).items() if key not in shown}
        with on_job.paused():
            if not shown:
                show_heading(results)
            show_tables(results.model_copy(update={"measurements": tuple(itertools.chain(*new.values()))}))
        shown.update(new)
        if target is not None:
            with _saying_what_is_saved(target):
                results.save(_unfinished(target))

    with on_job:
        return bench(
            technique.name,
            plan,
            device=device,
            machine=machine,
            worker=worker,
            previous=previous,
            on_job=on_job,
            on_progress=keep,
            again=again,
        )


def _previous(technique: Technique, machine: Machine, plan: Plan, target: Path | None) -> Results | None:
    """The unfinished results of this technique, else the finished ones, if they can be continued."""
    files = [] if target is None else [file for file in (_unfinished(target), target) if file.is_file()]
    if not files:
        messages.print(f"{technique.name}: there is nothing to resume, so the run begins anew")
        return None
    try:
        found = load(files[0])
        reason = why_not_resumed(found, technique, machine, plan)
    except UserError as error:
        reason = str(error)
    if reason is not None:
        messages.print(f"{technique.name}: not resumed, {reason}; the run begins anew", **PLAIN)
        return None
    messages.print(f"{technique.name}: kept what {files[0]} holds, {len(by_job(found))} jobs", **PLAIN)
    return found


def _unfinished(target: Path) -> Path:
    """Where results lie until they are complete."""
    return target.with_suffix(".partial.json")


def _target(json: Path | None, out: Path | None, slug: str, technique: Technique, *, one: bool) -> Path | None:
    """File for this technique's results; None if the user requested no file."""
    if json is not None:
        return json if one and json.suffix == ".json" else json / f"{technique.name}.json"
    return None if out is None else out / slug / f"{technique.name}.json"


@contextlib.contextmanager
def _saying_what_is_saved(target: Path) -> Iterator[None]:
    """End with one line if a file cannot be written, on a full disk for example; what was written before stays."""
    try:
        yield
    except OSError as error:
        kept = [file for file in (_unfinished(target), target) if file.is_file()]
        saved = f"{kept[0]} holds what was saved before; --resume continues from it" if kept else "nothing was saved"
        raise UserError(f"cannot write {target}: {error.strerror}; {saved}") from error


def _save(results: Results, target: Path | None) -> None:
    if target is None:
        if not results.complete:
            output.print("interrupted: not written", **PLAIN)
        return
    if not results.complete:
        with _saying_what_is_saved(target):
            results.save(_unfinished(target))
        output.print(f"interrupted; what stood is in {_unfinished(target)}, and --resume goes on", **PLAIN)
        return
    with _saying_what_is_saved(target):
        results.save(target)
    _unfinished(target).unlink(missing_ok=True)
    written = [target, *draw(results, target)]
    output.print(escape("written: " + ", ".join(map(str, written))), **PLAIN)
