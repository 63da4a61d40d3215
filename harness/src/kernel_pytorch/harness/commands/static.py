"""`kernel-pytorch static`: does the compiled code of every kernel keep its contract? No GPU is needed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.markup import escape

from kernel_pytorch.harness.commands.common import PLAIN, TechniqueArgument, messages, output, warn_broken
from kernel_pytorch.harness.discovery import UnknownNameError, discover
from kernel_pytorch.harness.readme import ReadmeError, read_block, write_block
from kernel_pytorch.harness.results import write_atomically
from kernel_pytorch.harness.static import ARCHITECTURES, Compiled, Inspection, Violation, inspect, violations
from kernel_pytorch.harness.static.inspection import WorkerError
from kernel_pytorch.harness.static.kernel_sources import triton_level
from kernel_pytorch.harness.static.table import markdown, terminal_tables

BLOCK = "static"


def static_command(
    technique: TechniqueArgument = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every launch of the test and bench grids, not the covering set alone.")
    ] = False,
    arch: Annotated[
        list[str] | None,
        typer.Option("--arch", help=f"One of {', '.join(ARCHITECTURES)}; all if omitted. May be given several times."),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="One row for every configuration.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Also write every configuration to this file.")] = None,
    readme: Annotated[
        Path | None, typer.Option("--readme", help="Also write the table into the README of the package that is named.")
    ] = None,
) -> None:
    """Compile every Triton and CUDA kernel for every architecture, and hold it to its contract: registers, widths, ...

    Exit code: 0 if every contract is kept, 1 if one is broken, 2 for a name that does not exist. What could not be
    compiled here for want of a CUDA compiler is named, and breaks nothing.
    """
    archs = _check_archs(arch)
    _check_readme(readme, technique, archs)
    discovery = discover()
    warn_broken(discovery)
    techniques = discovery.select(technique)
    if find_spec("triton") is None and any(map(triton_level, techniques)):
        messages.print("Triton is not installed here (pip install triton, on Linux), so nothing can be compiled.")
        raise typer.Exit(1)
    started = time.perf_counter()
    with messages.status("compiling") as status:

        def on_done(inspection: Inspection) -> None:
            status.update(f"compiling; done: {inspection.technique.name} for {inspection.arch}")

        try:
            inspections = inspect(techniques, archs, everything=everything, on_done=on_done)
        except WorkerError as error:
            messages.print(f"kernel-pytorch static: {escape(str(error))}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
    broken, missing = _broken(inspections), _missing(inspections)
    for table in terminal_tables(inspections, details):
        output.print(table)
    for violation in broken:
        output.print(f"[red]broken:[/red] {escape(str(violation))}", highlight=False, soft_wrap=True)
    for line in missing:
        output.print(f"[yellow]not compiled here:[/yellow] {escape(line)}", highlight=False, soft_wrap=True)
    if json is not None:
        write_atomically(json, _document(inspections, broken, missing))
    if readme is not None and missing:
        messages.print(f"not every kernel of {techniques[0].name} was compiled, so its README stays as it is", **PLAIN)
    elif readme is not None and not any(i.findings.compiled for i in inspections):
        messages.print(f"{techniques[0].name} launches no kernel, so its README stays as it is", **PLAIN)
    elif readme is not None and not broken:
        write_block(readme, BLOCK, markdown(techniques[0], inspections))
    output.print(_summary(inspections, broken, time.perf_counter() - started), highlight=False)
    if broken or (readme is not None and missing) or (technique is None and discovery.broken):
        raise typer.Exit(1)


def _check_archs(archs: list[str] | None) -> list[str]:
    for name in archs or []:
        if name not in ARCHITECTURES:
            raise UnknownNameError(f"no architecture {name!r}; there are: {', '.join(ARCHITECTURES)}")
    return [name for name in ARCHITECTURES if name in archs] if archs else list(ARCHITECTURES)


def _check_readme(readme: Path | None, technique: str | None, archs: list[str]) -> None:
    """End the command, before minutes of work, if the table could not be written."""
    if readme is None:
        return
    problem = None
    if technique is None:
        problem = "--readme: name the technique whose README it is"
    elif readme.resolve().parent.name != technique:
        problem = f"--readme: {readme} lies in {readme.resolve().parent.name}/, and is no README of {technique}"
    elif archs != list(ARCHITECTURES):
        problem = "--readme: its table holds all architectures; leave --arch out"
    else:
        try:
            read_block(readme, BLOCK)
        except ReadmeError as error:
            problem = str(error)
    if problem is not None:
        messages.print(f"kernel-pytorch: {escape(problem)}", highlight=False, soft_wrap=True)
        raise typer.Exit(2)


def _broken(inspections: Sequence[Inspection]) -> list[Violation]:
    """Broken contracts, and cases whose launches could not even be recorded."""
    broken: dict[Violation, None] = {}
    compiled: dict[str, list[Compiled]] = defaultdict(list)
    for inspection in inspections:
        name = inspection.technique.name
        compiled[name] += inspection.findings.compiled
        for problem in inspection.findings.problems:
            broken[Violation(name, "", inspection.arch, "", "launches can be recorded", "no error", problem)] = None
    for technique in {i.technique.name: i.technique for i in inspections}.values():
        complete = all(i.findings.complete for i in inspections if i.technique.name == technique.name)
        broken |= dict.fromkeys(violations(technique, compiled[technique.name], complete=complete))
    return list(broken)


def _missing(inspections: Iterable[Inspection]) -> list[str]:
    """Whose CUDA kernels were not compiled and why, each once: one line, not one for every architecture."""
    return list(
        dict.fromkeys(f"{i.technique.name}: {reason}" for i in inspections for reason in i.findings.not_compiled)
    )


def _document(inspections: Iterable[Inspection], broken: list[Violation], missing: list[str]) -> str:
    rows = [
        {"technique": i.technique.name, **c.model_dump(), "occupancy": c.occupancy}
        for i in inspections
        for c in i.findings.compiled
    ]
    document: dict[str, Any] = {
        "compiled": rows,
        "broken": [asdict(violation) for violation in broken],
        "not_compiled": missing,
    }
    return TypeAdapter(dict[str, Any]).dump_json(document, indent=1).decode() + "\n"


def _summary(inspections: list[Inspection], broken: list[Violation], seconds: float) -> str:
    compiled = sum(len(i.findings.compiled) for i in inspections)
    known = sum(len(i.findings.compiled) for i in inspections if i.cached)
    launches = sum(i.findings.launches for i in inspections)
    instantiations = sum(i.findings.instantiations for i in inspections)
    kept = "every contract kept" + ("" if all(i.findings.complete for i in inspections) else " of what was compiled")
    verdict = f"[red]promises broken: {len(broken)}[/red]" if broken else f"[green]{kept}[/green]"
    what = [f"{launches} distinct launches of both grids"] if launches or not instantiations else []
    what += [f"{instantiations} instantiations in CUDA C++"] if instantiations else []
    return (
        f"{verdict}: {compiled} compilations ({known} known from before) for the {' and '.join(what)}, "
        f"in {seconds:.0f} s"
    )
