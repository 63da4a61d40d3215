"""`kernel-pytorch static`: does the compiled code of every kernel keep its contract? No GPU is needed."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kernel_pytorch.harness.commands import common
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.static import ARCHITECTURES, Inspection, StaticRecord, inspect, summarize
from kernel_pytorch.harness.static.inspection import triton_level
from kernel_pytorch.harness.static.record import changed_kernels, known, load, record_file
from kernel_pytorch.harness.static.table import terminal_table
from kernel_pytorch.harness.technique import Technique


def static_command(
    technique: common.TechniqueArgument = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every launch of the test and bench grids, not the covering set alone.")
    ] = False,
    arch: Annotated[
        list[str] | None,
        typer.Option("--arch", help=f"One of {', '.join(ARCHITECTURES)}; all if omitted. May be given several times."),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--recorded",
            help="Compile nothing of which DIR/static holds a record of the same sources, cases and compilers; a record"
            " of other kernels than the present ones is an error.",
            metavar="DIR",
        ),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="One row for every configuration.")] = False,
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Also write every configuration to DIR/static/<technique>.kernels.json.", metavar="DIR"
        ),
    ] = None,
) -> None:
    """Compile every Triton kernel for every architecture, and check its contract: registers, widths, ...

    For kernels in CUDA C++, registers, spills and shared memory are checked, as ptxas printed them when the library was
    compiled; an architecture that it was not compiled for is named, and breaks nothing.

    Exit code: 0 if every contract is kept; 1 if one is broken, or with --recorded if the record is of other kernels;
    2 for a name that does not exist.
    """
    chosen = common.check_names("architecture", arch, ARCHITECTURES) or ARCHITECTURES
    if everything and recorded is not None:
        raise UserError("--all and --recorded: a record holds the covering set alone; give one of them")
    techniques, broken = common.select(technique)
    common.check_writable(json)
    if find_spec("triton") is None and any(map(triton_level, techniques)):
        common.messages.print(
            "Triton is not installed here (pip install triton, on Linux), so nothing can be compiled."
        )
        raise typer.Exit(1)
    started = time.perf_counter()
    have = {t.name: found for t in techniques if recorded is not None and (found := known(t, recorded)) is not None}
    techniques = [t for t in techniques if t.name not in have]
    with common.messages.status("compiling") as status:

        def on_done(inspection: Inspection) -> None:
            status.update(f"compiling; done: {inspection.technique} for {inspection.arch}")

        archs = [a for a in ARCHITECTURES if a in chosen]
        try:
            inspections = inspect(techniques, archs, everything=everything, on_done=on_done)
        except UserError as error:
            common.tell(f"kernel-pytorch static: {error}", to=common.messages)
            raise typer.Exit(1) from None
    by_technique = ((t, [i for i in inspections if i.technique == t.name]) for t in techniques)
    records = [*have.values(), *(summarize(t, found) for t, found in by_technique if found)]
    for record in records:
        if record.compiled:
            common.output.print(terminal_table(record, details))
        common.tell(*record.broken, mark="broken")
        missing = (f"{record.technique}: {reason}" for reason in record.not_compiled)
        common.tell(*missing, mark="not known here", color="yellow")
        if json is not None:
            file = record_file(json, record.technique)
            record.save(file)
            common.tell(f"written: {file}")
    common.tell(*(f"{n}: {len(r.compiled)} compilations as recorded; nothing changed since" for n, r in have.items()))
    outdated = [] if recorded is None else [line for record in records for line in _outdated(record, recorded)]
    common.tell(*outdated, mark="changed since it was recorded")
    common.output.print(_summary(inspections, records, time.perf_counter() - started), highlight=False)
    if outdated or any(record.broken for record in records) or broken:
        raise typer.Exit(1)


def record_once(technique: Technique, results: Path) -> None:
    """Run `kernel-pytorch static TECHNIQUE --json RESULTS` where there are Triton kernels and no record of them yet."""
    if triton_level(technique) and find_spec("triton") and not record_file(results, technique.name).exists():
        static_command(technique.name, json=results)


def _outdated(now: StaticRecord, results: Path) -> list[str]:
    """Name what a record holds otherwise than what was compiled now, with the command that writes it anew."""
    file = record_file(results, now.technique)
    try:
        changed = changed_kernels(load(file), now)
    except UserError as error:
        return [str(error)]
    how = f"`kernel-pytorch static {now.technique} --json {results}` writes {file} anew"
    return [f"{', '.join(changed)}: {how}"] if changed else []


def _summary(inspections: list[Inspection], records: list[StaticRecord], seconds: float) -> str:
    broken = sum(len(record.broken) for record in records)
    kept = "every contract kept" + " of what was compiled" * any(i.not_compiled for i in inspections)
    verdict = f"[red]promises broken: {broken}[/red]" if broken else f"[green]{kept}[/green]"
    if records and not inspections:
        return f"{verdict}, as recorded"
    compiled = sum(len(i.compiled) for i in inspections)
    before = sum(len(i.compiled) for i in inspections if i.cached)
    launches = sum(i.launches for i in inspections)
    in_cuda = sum(c.language == "CUDA" for i in inspections for c in i.compiled)
    what = [f"{launches} distinct launches of both grids"] if launches or not in_cuda else []
    what += [f"{in_cuda} instantiations in CUDA C++"] if in_cuda else []
    known = f"{compiled} compilations ({before} known from before)"
    return f"{verdict}: {known} for the {' and '.join(what)}, in {seconds:.0f} s"
