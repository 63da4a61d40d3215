"""`kernel-pytorch bench`: how fast is every level, of what the machine can do?"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.benchmark import Plan, benchmark, by_job, of_present_sources, why_not_resumed
from kernel_pytorch.harness.commands.common import (
    PLAIN,
    DeviceOption,
    LevelOption,
    OperationOption,
    PeersOption,
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
from kernel_pytorch.harness.commands.report import draw, show
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.isolation import Worker
from kernel_pytorch.harness.jobs import DIRECTIONS
from kernel_pytorch.harness.machine import Machine, measure_machine
from kernel_pytorch.harness.report import wrong_on_real_input
from kernel_pytorch.harness.results import Measurement, Results, ResultsError, load
from kernel_pytorch.harness.technique import Direction, Level, Technique

CASE_TIMEOUT = 600.0


def bench_command(
    technique: TechniqueArgument = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two cases per operation and fewer rounds: a first look.")
    ] = False,
    level: LevelOption = None,
    operation: OperationOption = None,
    device: DeviceOption = None,
    direction: Annotated[
        list[Direction] | None,
        typer.Option(
            "--direction", help="Only this pass. May be given several times; forward and backward if omitted."
        ),
    ] = None,
    peers: PeersOption = None,
    whole_cost: Annotated[
        bool,
        typer.Option(
            "--whole-cost", help="Also measure host time, memory, compilation and launches, which takes longer."
        ),
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Write the results to this file (one technique) or folder instead of results/."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder that holds one folder per device.")] = Path("results"),
    machine: Annotated[
        Path | None,
        typer.Option("--machine", help="Use this record of `kernel-pytorch machine --json` instead of measuring."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted run instead of beginning anew.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds after which a case counts as hanging.")
    ] = CASE_TIMEOUT,
) -> None:
    """Time every level on shapes of published models, implementations interleaved, inputs cold, outputs checked.

    A full run writes <out>/<device>/<technique>.json, beside it plots of each operation. A partial one (--quick,
    --level, --operation, --direction) writes a file only where --json says, so that it never replaces a full one. A
    case that crashes or hangs costs itself alone. What stands is kept after every case: Ctrl-C loses nothing, --resume
    goes on.
    Exit code: 0; 1 if a level was wrong, crashed, or was faster than this machine can be; 2 for a name that does not
    exist; 130 after Ctrl-C.
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
    wanted, of = (None if names is None else tuple(names) for names in (levels, operations))
    plan = Plan(wanted, quick, tuple(direction or DIRECTIONS), whole_cost, of)
    partial = quick or any(choice is not None for choice in (levels, operations, direction))
    warn_if_busy()
    check_writable(json)
    if partial and json is None:
        messages.print("A partial run: its figures are printed and not kept; --json FILE keeps them.")
    ceilings = _machine(machine, where, quick=quick)
    refused = False
    with Worker(timeout, prepare) as worker:
        for selected in techniques:
            target = _target(json, out, ceilings, selected, partial=partial, one=len(techniques) == 1)
            results = _measure(selected, ceilings, where, plan, worker, target, resume=resume)
            show(results)
            _save(results, target)
            refused |= any(map(_fails, results.measurements))
            refused |= wrong_on_real_input(results)
            if not results.complete:
                raise typer.Exit(130)
    if refused:
        raise typer.Exit(1)


def _fails(m: Measurement) -> bool:
    """Whether the run has failed by this: a wrong level of ours, or one that could not be measured."""
    if m.status == "wrong":
        return m.level in (Level.TRITON.value, Level.CUDA.value)
    return m.status in ("rejected", "crashed") and m.level != Level.PEER.value


def _machine(file: Path | None, device: torch.device, *, quick: bool) -> Machine:
    """The record in the file, or a new one."""
    if file is not None:
        try:
            return Machine.model_validate_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = escape(str(error).splitlines()[0])
            messages.print(f"kernel-pytorch: {file} is no record of a machine: {reason}", **PLAIN)
            raise typer.Exit(2) from None
    with messages.status("measuring what this machine can do") as status:
        announce = "measuring the machine: {}".format
        return measure_machine(device, quick=quick, on_step=lambda step: status.update(announce(step)))


def _measure(
    technique: Technique,
    machine: Machine,
    device: torch.device,
    plan: Plan,
    worker: Worker,
    target: Path | None,
    *,
    resume: bool,
) -> Results:
    previous = _previous(technique, machine, plan, target) if resume else None

    def keep(results: Results) -> None:
        if target is not None:
            results.save(_unfinished(target))

    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=messages, transient=True) as progress, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.*deprecated")
        task = progress.add_task(technique.name, total=len(plan.jobs(technique, device)) + 1)
        started = iter([0])

        def on_job(label: str) -> None:
            progress.update(task, description=label, advance=next(started, 1))

        return benchmark(
            technique, machine, device, plan, worker=worker, previous=previous, on_job=on_job, on_progress=keep
        )


def _previous(technique: Technique, machine: Machine, plan: Plan, target: Path | None) -> Results | None:
    """The unfinished results of this technique, else the finished ones, if they can be continued."""
    files = [] if target is None else [file for file in (_unfinished(target), target) if file.is_file()]
    if not files:
        messages.print(f"{technique.name}: there is nothing to resume, so the run begins anew")
        return None
    try:
        found = load(files[0])
        reason = why_not_resumed(found, machine, plan)
    except ResultsError as error:
        reason = str(error)
    if reason is not None:
        messages.print(f"{technique.name}: not resumed, {reason}; the run begins anew", **PLAIN)
        return None
    kept = of_present_sources(found, technique)
    jobs = f"{len(by_job(kept))} of {len(by_job(found))} jobs"
    messages.print(f"{technique.name}: kept what {files[0]} holds of the present sources, {jobs}", **PLAIN)
    return kept


def _unfinished(target: Path) -> Path:
    """Where results lie until they are complete."""
    return target.with_suffix(".partial.json")


def _target(
    json: Path | None, out: Path, machine: Machine, technique: Technique, *, partial: bool, one: bool
) -> Path | None:
    """Where this technique's results go; None where nobody asked for a file of a partial run."""
    if json is not None:
        return json if one and json.suffix == ".json" else json / f"{technique.name}.json"
    return None if partial else out / machine.slug / f"{technique.name}.json"


def _save(results: Results, target: Path | None) -> None:
    if target is None:
        state = "a partial run" if results.complete else "interrupted"
        output.print(f"{state}: not written; give --json to keep it")
        return
    if not results.complete:
        results.save(_unfinished(target))
        output.print(f"interrupted; what stood is in {_unfinished(target)}, and --resume goes on", **PLAIN)
        return
    results.save(target)
    _unfinished(target).unlink(missing_ok=True)
    written = [target, *draw(results, target)]
    output.print(escape("written: " + ", ".join(map(str, written))), **PLAIN)
