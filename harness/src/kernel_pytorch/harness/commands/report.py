"""`kernel-pytorch report`: tables and plots from results that were measured before, anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kernel_pytorch.harness.commands.common import PLAIN, messages, output
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.report import (
    accuracy_table,
    cost_table,
    markdown,
    missing_costs,
    plot,
    reasons,
    terminal_tables,
)
from kernel_pytorch.harness.results import VERIFICATION_SUFFIX, Results, ResultsError, load, write_atomically
from kernel_pytorch.harness.sources import implementation_digest

OTHER_FILES = ("pytest-benchmark.json", ".partial.json", VERIFICATION_SUFFIX)
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def report_command(
    path: Annotated[Path, typer.Argument(help="A results file, or a folder that holds some.")] = Path("results"),
    check_stale: Annotated[
        bool, typer.Option("--check-stale", help="Only name results whose sources have changed since; exit 1 if any.")
    ] = False,
    readme: Annotated[
        Path | None,
        typer.Option("--readme", help="Only write the tables of one package into its README, between its two markers."),
    ] = None,
) -> None:
    """Print the tables of results and draw their plots beside them (PNG and SVG).

    Exit code: 0; 1 with --check-stale if sources have changed since they were measured; 2 for what cannot be read.
    """
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    files = [file for file in files if not file.name.endswith(OTHER_FILES)]
    if not files:
        messages.print(f"kernel-pytorch: no results in {path}; `kernel-pytorch bench` makes them", **PLAIN)
        raise typer.Exit(2)
    try:
        found = {file: load(file) for file in files}
    except ResultsError as error:
        messages.print(f"kernel-pytorch: {error}", **PLAIN)
        raise typer.Exit(2) from None
    if check_stale:
        stale = [f"{file}: {what}" for file, results in found.items() for what in stale_sources(results)]
        for line in stale or [f"{len(found)} results files, all of the present sources"]:
            output.print(escape(line), **PLAIN)
        raise typer.Exit(1 if stale else 0)
    if readme is not None:
        if not readme.is_file():
            messages.print(f"kernel-pytorch: no file {escape(str(readme))}", **PLAIN)
            raise typer.Exit(2)
        write_readme(readme, list(found.values()))
        return
    for file, results in found.items():
        show(results)
        draw(results, file.parent)


def write_readme(readme: Path, found: list[Results]) -> None:
    """Put the tables of the technique that lies beside `readme` between its markers."""
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    tables = [markdown(results) for results in found if results.technique == readme.resolve().parent.name]
    if not begin or not end or not tables:
        missing = f"no results of {readme.resolve().parent.name}" if begin and end else f"no {BEGIN} and {END}"
        messages.print(f"kernel-pytorch: {readme} was not written: {missing}", **PLAIN)
        raise typer.Exit(2)
    body = "\n".join(tables)
    write_atomically(readme, f"{before}{begin}\n{body}{end}{after}")


def show(results: Results) -> None:
    """Print everything that a results file holds."""
    environment = results.machine.environment
    output.rule(f"{results.technique} on {environment.device_name}, torch {environment.torch}, {results.created[:10]}")
    for table in terminal_tables(results):
        output.print(table)
    if results.accuracy:
        output.print(accuracy_table(results))
    elif results.real_input:
        output.print(f"accuracy on real activations: {escape(results.real_input)}", **PLAIN)
    if results.costs:
        output.print(cost_table(results))
    for reason in [*missing_costs(results), *reasons(results)]:
        output.print(escape(reason), **PLAIN)


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw the plots into a folder, or say what is missing."""
    try:
        return plot(results, folder)
    except ModuleNotFoundError as error:
        output.print(f"no plot: {error} (pip install 'kernel-pytorch-harness\\[plot]')", **PLAIN)
        return []


def stale_sources(results: Results) -> list[str]:
    """Implementations whose sources are no longer those that were measured."""
    discovery = discover()
    if results.technique not in discovery.techniques:
        return [f"technique {results.technique} is not installed here"]
    now = {
        f"{o.name}/{i.name}": implementation_digest(i)
        for o in discovery.techniques[results.technique].operations
        for i in o.implementations
    }
    measured = {f"{m.operation}/{m.implementation}" for m in results.measurements if m.status == "measured"}
    return [
        f"{name} has changed since it was measured" if name in now else f"{name} no longer exists"
        for name in sorted(measured)
        if now.get(name) != results.sources.get(name)
    ]
