"""`kernel-pytorch bench`: how fast is every level, of what the machine can do?"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..benchmark import benchmark, jobs
from ..discovery import discover
from ..machine import Machine, measure_machine
from ..report import accuracy_table, plot, reasons, terminal_tables
from ..results import Results
from ..technique import Technique
from .common import (
    DeviceOption,
    LevelOption,
    TechniqueArgument,
    check_levels,
    messages,
    output,
    parse_device,
    warn_broken,
)


def bench_command(
    technique: TechniqueArgument = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two cases per operation and fewer rounds: a first look.")] = False,
    level: LevelOption = None,
    device: DeviceOption = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Write the results to this file (one technique) or folder instead of results/."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder that holds one folder per device.")] = Path("results"),
) -> None:
    """Time every level on shapes of published models, implementations interleaved, inputs cold, outputs checked.

    A full run writes <out>/<device>/<technique>.json with a PNG and an SVG plot beside it. A partial one (--quick,
    --level) writes a file only where --json says, so that it never replaces a full one. Ctrl-C keeps what was measured.
    Exit code: 0, 1 if a level was wrong or faster than this machine can be, 2 for a name that does not exist.
    """
    where = parse_device(device)
    discovery = discover()
    warn_broken(discovery)
    techniques = discovery.select(technique)
    levels = check_levels(level, techniques)
    if not techniques:
        messages.print("No technique is installed, so there is nothing to measure.")
        raise typer.Exit(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.*deprecated", DeprecationWarning)
        with messages.status("measuring what this machine can do") as status:
            machine = measure_machine(where, quick=quick, on_step=lambda s: status.update(f"measuring the machine: {s}"))
        refused = False
        for selected in techniques:
            results = _measure(selected, machine, where, levels, quick)
            _show(results)
            _save(results, _target(json, out, machine, selected, partial=quick or levels is not None, one=len(techniques) == 1))
            refused |= any(m.status in ("wrong", "rejected") for m in results.measurements)
            if not results.complete:
                raise typer.Exit(130)
    if refused:
        raise typer.Exit(1)


def _measure(
    technique: Technique, machine: Machine, device: torch.device, levels: list[str] | None, quick: bool
) -> Results:
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=messages, transient=True) as progress:
        task = progress.add_task(technique.name, total=len(jobs(technique, device, quick=quick)) + 1)
        started = iter([0])

        def on_job(label: str) -> None:
            progress.update(task, description=label, advance=next(started, 1))

        return benchmark(technique, machine, device, levels=levels, quick=quick, on_job=on_job)


def _show(results: Results) -> None:
    for table in terminal_tables(results):
        output.print(table)
    if results.accuracy:
        output.print(accuracy_table(results))
    else:
        output.print(f"accuracy on real activations: {escape(results.real_input)}", soft_wrap=True)
    for reason in reasons(results):
        output.print(escape(reason), soft_wrap=True, highlight=False)


def _target(
    json: Path | None, out: Path, machine: Machine, technique: Technique, *, partial: bool, one: bool
) -> Path | None:
    """Where this technique's results go; None where nobody asked for a file of a partial run."""
    if json is not None:
        return json if one and json.suffix == ".json" else json / f"{technique.name}.json"
    return None if partial else out / machine.slug / f"{technique.name}.json"


def _save(results: Results, path: Path | None) -> None:
    if path is None:
        output.print("a partial run: not written; give --json to keep it")
        return
    if not results.complete:
        path = path.with_suffix(".partial.json")
    results.save(path)
    written = [path]
    if results.complete:
        try:
            written += plot(results, path.parent)
        except ModuleNotFoundError as error:
            output.print(f"no plot: {error} (pip install 'kernel-pytorch-harness[plot]')", highlight=False)
    output.print("written: " + ", ".join(map(str, written)), soft_wrap=True, highlight=False)
