"""`kernel-pytorch bench`: how fast is every level, of what the machine can do?"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kernel_pytorch.harness.api import level_names
from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.benchmark import Plan, bench, by_job, why_not_resumed
from kernel_pytorch.harness.commands import common
from kernel_pytorch.harness.commands.report import draw, show, show_rest, write_readmes
from kernel_pytorch.harness.commands.static import record_once
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.isolation import Worker
from kernel_pytorch.harness.machine import Machine, measure_ceilings, measure_machine
from kernel_pytorch.harness.results import Measurement, Results, load
from kernel_pytorch.harness.technique import Direction, Level, Technique
from kernel_pytorch.harness.workload import QUICK_CASES, SHORT_CASES, JobKey

CASE_TIMEOUT = 600.0
RESULTS = Path("results")

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
OverheadsOption = Annotated[
    bool,
    typer.Option("--overheads", help="Also measure host time, memory, compilation and launches, which takes longer."),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write the results to this file (one technique) or folder.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Write the results into <out>/<device>/. With --full: results, if omitted.")
]
MachineOption = Annotated[
    Path | None,
    typer.Option("--machine", help="Use this record of `kernel-pytorch calibrate --json` instead of measuring."),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run instead of beginning anew.")]


def bench_command(
    technique: common.TechniqueArgument = None,
    quick: QuickOption = False,
    full: FullOption = False,
    level: common.LevelOption = None,
    operation: common.OperationOption = None,
    device: common.DeviceOption = None,
    direction: DirectionOption = None,
    peers: common.PeersOption = None,
    overheads: OverheadsOption = False,
    json: JsonOption = None,
    out: OutOption = None,
    machine: MachineOption = None,
    resume: ResumeOption = False,
    timeout: common.TimeoutOption = CASE_TIMEOUT,
) -> None:
    """Time every level on shapes of published models, implementations interleaved, inputs cold, outputs checked.

    Without options it is a short run: one case of each operation, fewer rounds, the cheapest technique first. Its
    tables are printed; it is written only where --json or --out says. --quick measures only the first operation of each
    technique, in two cases. --full measures every case and writes results/<device>/<technique>.json with plots beside
    it, and in a checkout the table of the package's README and the first record of what its kernels compile to; a part
    of it (--level, --operation, --direction) is written only where --json or --out says. A short run never replaces a
    full one. What was measured is kept after every case of a run that is written: Ctrl-C loses nothing, --resume
    continues. A case that crashes is isolated from the others. PyTorch's own levels and other libraries are timed
    although they miss the error budget, and shown with their error.

    Exit code: 0; 1 if a level of ours is wrong, or anything crashed or was faster than this machine can be; 2 for a
    name or an option that does not exist or cannot be obeyed; 130 after Ctrl-C.
    """
    where = parse_device(device)
    prepare = common.load_peers(peers)
    techniques, _ = common.select(technique, "measure")
    levels = common.check_names("level", level, level_names(o for t in techniques for o in t.operations))
    operations = common.check_names("operation", operation, common.operation_names(techniques))
    if (quick and full) or (json and out):
        raise UserError(f"{'--quick and --full' if quick and full else '--json and --out'}: give one of them")
    cases = QUICK_CASES if quick else SHORT_CASES
    shared = Plan(None, not full, tuple(direction or ()) or None, overheads, None, cases)
    plans = {t.name: _plan_for(t, shared, levels, operations, first=quick) for t in techniques}
    whole = full and levels is operations is direction is None
    if out is None and json is None and whole:
        out = RESULTS
    ceilings, again = None if machine is None else Machine.load(machine), None
    slug = ceilings.slug if ceilings else describe_environment(where).slug
    targets = {t.name: _target(json, out and out / slug, t.name, len(techniques) == 1, full) for t in techniques}
    common.warn_if_busy()
    if json is None and out is None:
        common.tell(NOT_WRITTEN if not full else NOT_WRITTEN_PART, to=common.messages)
    if ceilings is None:
        again = partial(measure_ceilings, where, quick=not full)
        with common.Steps("measuring the machine") as step:
            ceilings = measure_machine(where, quick=not full, on_step=step)
    refused = False
    with Worker(timeout, prepare) as worker:
        for each in sorted(techniques, key=lambda t: _cost(t, where, plans[t.name])):
            plan, target = plans[each.name], targets[each.name]
            previous = _previous(each, ceilings, plan, target) if resume else None
            results = _measure_all(
                each, plan, target, device=where, machine=ceilings, worker=worker, previous=previous, again=again
            )
            ceilings = results.machine  # raised ceilings also hold for the techniques that follow
            show_rest(results)
            _save(results, target)
            refused |= any(map(_fails, results.measurements))
            if not results.complete:
                raise typer.Exit(130)
    if whole and out == RESULTS:
        _publish(techniques)
    if refused:
        raise typer.Exit(1)


def _publish(techniques: Iterable[Technique]) -> None:
    """Write the table of each package's README and the first record of its kernels, in a checkout."""
    for each in techniques:
        if (readme := Path("packages", each.name, "README.md")).is_file():
            write_readmes(readme, map(load, RESULTS.glob(f"*/{each.name}.json")))
            common.tell(f"written: {readme}")
            record_once(each, RESULTS)


def _plan_for(
    technique: Technique, plan: Plan, levels: list[str] | None, operations: list[str] | None, *, first: bool
) -> Plan:
    """The plan for one technique: the levels and operations that it has, or its `first` operation."""
    names = tuple(o.name for o in technique.operations)
    chosen = names[:1] if first and operations is None else common.of_these(names, operations)
    return replace(plan, operations=chosen, levels=common.of_these(level_names(technique.operations), levels))


def _cost(technique: Technique, device: torch.device, plan: Plan) -> int:
    """Bytes and FLOPs of all jobs: the first table is to come soon."""
    costs = [job.operation.cost(job.case, job.direction) for job in plan.jobs(technique, device)]
    return sum(cost.bytes + cost.flops for cost in costs)


def _target(json: Path | None, folder: Path | None, name: str, one: bool, full: bool) -> Path | None:
    """File for the results of the technique of that name; None if the user requested no file.

    Raises UserError, before anything is measured, if results could not or must not be written there.
    """
    if json is not None:
        target = json if one and json.suffix == ".json" else json / f"{name}.json"
    elif folder is not None:
        target = folder / f"{name}.json"
    else:
        return None
    common.check_writable(target)
    try:
        may_replace = full or not target.is_file() or load(target).quick
    except UserError:  # it is no full run
        may_replace = True
    if not may_replace:
        raise UserError(f"{target} holds a full run, which only --full replaces; give another --json or --out")
    return target


def _fails(m: Measurement) -> bool:
    """Whether the run has failed by this: a wrong level of ours, or one that could not be measured."""
    if m.status == "wrong":
        return m.level in (Level.TRITON.value, Level.CUDA.value)
    return m.status in ("rejected", "crashed") and m.level != Level.PEER.value


def _measure_all(
    technique: Technique, plan: Plan, target: Path | None, *, device: torch.device, **given: Any
) -> Results:
    """Measure a technique; print each table as it is found, so that the first one comes soon, and keep it."""
    shown: set[JobKey] = set()
    on_job = common.Steps(technique.name, len(plan.jobs(technique, device)) + (not plan.quick))

    def keep(results: Results) -> None:
        new = {key: found for key, found in by_job(results).items() if key not in shown}
        with on_job.paused():
            show(results.model_copy(update={"measurements": tuple(itertools.chain(*new.values()))}), heading=not shown)
        shown.update(new)
        if target is not None:
            _write(results, _unfinished(target), target)

    with on_job:
        return bench(technique, plan, device=device, on_job=on_job, on_progress=keep, **given)


def _previous(technique: Technique, machine: Machine, plan: Plan, target: Path | None) -> Results | None:
    """The unfinished results of this technique, else the finished ones, if they can be continued."""
    if not (files := _kept(target)):
        common.messages.print(f"{technique.name}: there is nothing to resume, so the run begins anew")
        return None
    try:
        found = load(files[0])
        reason = why_not_resumed(found, technique, machine, plan)
    except UserError as error:
        reason = str(error)
    if reason is not None:
        common.tell(f"{technique.name}: not resumed, {reason}; the run begins anew", to=common.messages)
        return None
    common.tell(f"{technique.name}: kept what {files[0]} holds, {len(by_job(found))} jobs", to=common.messages)
    return found


def _unfinished(target: Path) -> Path:
    """Where results lie until they are complete."""
    return target.with_suffix(".partial.json")


def _kept(target: Path | None) -> list[Path]:
    """The files of earlier results, unfinished ones first."""
    return [] if target is None else [file for file in (_unfinished(target), target) if file.is_file()]


def _write(results: Results, file: Path, target: Path) -> None:
    """Write a file. Raises UserError if it cannot be written, on a full disk for example; earlier files stay."""
    try:
        results.save(file)
    except OSError as error:
        kept = _kept(target)
        saved = f"{kept[0]} holds what was saved before; --resume continues from it" if kept else "nothing was saved"
        raise UserError(f"cannot write {target}: {error.strerror}; {saved}") from error


def _save(results: Results, target: Path | None) -> None:
    if target is not None:
        _write(results, target if results.complete else _unfinished(target), target)
    if not results.complete:
        kept = f"; what stood is in {_unfinished(target)}, and --resume goes on" if target else ": not written"
        common.tell(f"interrupted{kept}")
    elif target is not None:
        _unfinished(target).unlink(missing_ok=True)
        common.tell("written: " + ", ".join(map(str, [target, *draw(results, target)])))
