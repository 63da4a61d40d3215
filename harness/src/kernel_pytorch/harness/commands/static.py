"""`kernel-pytorch static`: does the compiled code of every kernel keep its contract? No GPU is needed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.markup import escape
from rich.table import Table

from kernel_pytorch.harness.commands.common import TechniqueArgument, messages, output, warn_broken
from kernel_pytorch.harness.discovery import UnknownNameError, discover
from kernel_pytorch.harness.results import write_atomically
from kernel_pytorch.harness.static import ARCHITECTURES, Compiled, Inspection, Violation, inspect, violations
from kernel_pytorch.harness.static.compiled import Traffic
from kernel_pytorch.harness.static.inspection import WorkerError
from kernel_pytorch.harness.static.limits import KIB

COLUMNS = ("registers", "spilled", "shared", "loads", "stores", "tf32", "f64", "matrix", "copies", "occupancy")


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
) -> None:
    """Compile every Triton kernel for every architecture, and hold it to its contract: registers, widths, tf32, ...

    Exit code: 0 if every contract is kept, 1 if one is broken, 2 for a name that does not exist.
    """
    archs = _check_archs(arch)
    discovery = discover()
    warn_broken(discovery)
    techniques = discovery.select(technique)
    if find_spec("triton") is None:
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
    broken = _broken(inspections)
    for table in tables(inspections, details):
        output.print(table)
    for violation in broken:
        output.print(f"[red]broken:[/red] {escape(str(violation))}", highlight=False, soft_wrap=True)
    if json is not None:
        write_atomically(json, _document(inspections, broken))
    output.print(_summary(inspections, broken, time.perf_counter() - started), highlight=False)
    if broken or (technique is None and discovery.broken):
        raise typer.Exit(1)


def _check_archs(archs: list[str] | None) -> list[str]:
    for name in archs or []:
        if name not in ARCHITECTURES:
            raise UnknownNameError(f"no architecture {name!r}; there are: {', '.join(ARCHITECTURES)}")
    return [name for name in ARCHITECTURES if name in archs] if archs else list(ARCHITECTURES)


def _broken(inspections: Iterable[Inspection]) -> list[Violation]:
    """Broken contracts, and cases whose launches could not even be recorded."""
    broken: dict[Violation, None] = {}
    compiled: dict[str, list[Compiled]] = defaultdict(list)
    for inspection in inspections:
        name = inspection.technique.name
        compiled[name] += inspection.findings.compiled
        for problem in inspection.findings.problems:
            broken[Violation(name, "", inspection.arch, "", "launches can be recorded", "no error", problem)] = None
    for technique in {i.technique.name: i.technique for i in inspections}.values():
        broken |= dict.fromkeys(violations(technique, compiled[technique.name]))
    return list(broken)


def tables(inspections: Iterable[Inspection], details: bool) -> list[Table]:
    """One table per technique: a row for every kernel and architecture, or for every configuration."""
    rows: dict[str, dict[tuple[str, ...], list[Compiled]]] = defaultdict(lambda: defaultdict(list))
    for inspection in inspections:
        for c in inspection.findings.compiled:
            if not c.error and not c.float64_scalars:
                about = (c.kernel, c.arch, *([c.configuration] if details else []))
                rows[inspection.technique.name][about].append(c)
    drawn = []
    for technique, of_technique in rows.items():
        table = Table(title=f"{technique}: the worst of all configurations of a kernel", title_justify="left")
        table.add_column("kernel", no_wrap=True)
        table.add_column("arch", no_wrap=True)
        table.add_column("configuration" if details else "of")
        for column in COLUMNS:
            table.add_column(column)
        previous = None
        for about, compiled in sorted(of_technique.items(), key=lambda row: row[0][0]):
            if previous not in (None, about[0]):
                table.add_section()
            previous = about[0]
            table.add_row(*about, *([] if details else [str(len(compiled))]), *cells(compiled))
        drawn.append(table)
    return drawn


def cells(compiled: list[Compiled]) -> list[str]:
    """The worst value of each column; widths are those of the bench cases, where there are any."""
    bench = [c for c in compiled if c.bench] or compiled
    matrix = dict.fromkeys(kind for c in compiled for kind in c.matrix)
    copies = {"bulk": any(c.bulk_copies for c in compiled), "async": any(c.async_copies for c in compiled)}
    return [
        str(max(c.registers for c in compiled)),
        str(max(c.spill_bytes for c in compiled)),
        f"{max(c.shared_bytes for c in compiled) / KIB:.4g} KiB",
        _width([c.loads for c in bench]),
        _width([c.stores for c in bench]),
        str(max(c.tf32 for c in compiled)),
        str(max(c.f64 for c in compiled)),
        " ".join(matrix) or "-",
        " ".join(kind for kind, there in copies.items() if there) or "-",
        f"{min(c.occupancy for c in compiled):.0%}",
    ]


def _width(traffic: list[Traffic]) -> str:
    """The narrowest of the widest accesses, and which part of the bytes it carries."""
    worst = min(traffic, key=lambda t: (t.widest, t.share(t.widest)))
    return "bulk" if worst.bulk else f"{worst.widest} ({worst.share(worst.widest):.0%})"


def _document(inspections: Iterable[Inspection], broken: list[Violation]) -> str:
    rows = [
        {"technique": i.technique.name, **c.model_dump(), "occupancy": c.occupancy}
        for i in inspections
        for c in i.findings.compiled
    ]
    document: dict[str, Any] = {"compiled": rows, "broken": [asdict(violation) for violation in broken]}
    return TypeAdapter(dict[str, Any]).dump_json(document, indent=1).decode() + "\n"


def _summary(inspections: list[Inspection], broken: list[Violation], seconds: float) -> str:
    compiled = sum(len(i.findings.compiled) for i in inspections)
    known = sum(len(i.findings.compiled) for i in inspections if i.cached)
    launches = sum(i.findings.launches for i in inspections)
    verdict = f"[red]promises broken: {len(broken)}[/red]" if broken else "[green]every contract kept[/green]"
    return (
        f"{verdict}: {compiled} compilations ({known} known from before) for the {launches} distinct launches "
        f"of both grids, in {seconds:.0f} s"
    )
