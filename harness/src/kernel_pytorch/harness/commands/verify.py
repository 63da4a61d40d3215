"""`kernel-pytorch verify`: is every level right?"""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..discovery import discover
from ..verification import Verification, is_economical, trials, verify
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


def verify_command(
    technique: TechniqueArgument = None,
    level: LevelOption = None,
    device: DeviceOption = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Run torch.compile on every case too, not on the core cases alone.")
    ] = False,
) -> None:
    """Hold every level against the reference in float64, forward and gradients, on awkward and adversarial inputs.

    A level may err twice as far as the reference itself does in that dtype, plus one unit in the last place. Exit code:
    0 if every level that can run here is right, 1 if any is wrong, 2 for a name that does not exist.
    """
    where = parse_device(device)
    discovery = discover()
    warn_broken(discovery)
    techniques = discovery.select(technique)
    levels = check_levels(level, techniques)
    if not techniques:
        messages.print("No technique is installed, so there is nothing to verify.")
        raise typer.Exit(1)
    total = sum(
        exhaustive or is_economical(i, trial)
        for t in techniques
        for o in t.operations
        for i in o.implementations
        if levels is None or i.name in levels
        for trial in trials(o, where)
    )
    found: list[Verification] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages, transient=True) as progress, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.*deprecated", DeprecationWarning)
        task = progress.add_task("verifying", total=total)
        for selected in techniques:
            for verification in verify(selected, where, levels=levels, exhaustive=exhaustive):
                found.append(verification)
                progress.update(task, advance=1, description=f"{verification.operation} {verification.implementation}")
    output.print(summary(found))
    failures = [line for verification in found for line in verification.failures()]
    for line in failures:
        output.print(f"[red]wrong:[/red] {escape(line)}", highlight=False, soft_wrap=True)
    if broken := technique is None and discovery.broken:
        output.print(f"[red]broken packages:[/red] {', '.join(broken)}")
    if failures or broken:
        raise typer.Exit(1)


def summary(found: list[Verification]) -> Table:
    """One row per operation and level."""
    rows: dict[tuple[str, str, str], list[Verification]] = defaultdict(list)
    for v in found:
        rows[v.technique, v.operation, v.implementation].append(v)
    table = Table(title="held against the reference in float64", title_justify="left")
    for column in ("technique", "operation", "level", "cases right", "worst error, of its budget", "could not run"):
        table.add_column(column)
    for names, verifications in rows.items():
        ran = [v for v in verifications if v.unavailable is None]
        right = [v for v in ran if v.passed]
        style = "green" if len(right) == len(ran) else "red"
        reasons = sorted({str(v.unavailable) for v in verifications if v.unavailable is not None})
        skipped = len(verifications) - len(ran)
        table.add_row(
            *names,
            f"[{style}]{len(right)} of {len(ran)}[/{style}]" if ran else "[yellow]none ran[/yellow]",
            f"{max(v.worst for v in ran):.0%}" if ran and max(v.worst for v in ran) != float("inf") else "",
            escape(f"{skipped}: {'; '.join(reasons)}") if skipped else "",
        )
    return table
