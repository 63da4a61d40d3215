"""`kernel-pytorch compare`: did a change make anything slower?"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kernel_pytorch.harness.clock import Verdict
from kernel_pytorch.harness.commands.common import PLAIN, output
from kernel_pytorch.harness.compare import Change, compare, environment_differences
from kernel_pytorch.harness.results import load


def percentage(text: str) -> float:
    """A share from "5%" or "0.05"; a number from 1 on needs its percent sign, since 5 could be meant as either.

    Raises:
        typer.BadParameter: it is neither.
    """
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share < (10.0 if text.endswith("%") else 1.0):
        raise typer.BadParameter(f"given {text!r}; give a share such as 5% or 0.05")
    return share


def compare_command(
    old: Annotated[Path, typer.Argument(help="Results file of the earlier run.")],
    new: Annotated[Path, typer.Argument(help="Results file of the later run.")],
    fail_if_slower: Annotated[
        float | None,
        typer.Option(
            "--fail-if-slower",
            parser=percentage,
            metavar="SHARE",
            help="Exit 1 if a case is slower by more than this (5%), whatever its intervals leave open, or has no "
            "figure any more.",
        ),
    ] = None,
    across_devices: Annotated[
        bool, typer.Option("--across-devices", help="Compare files of different devices all the same.")
    ] = False,
) -> None:
    """Compare two results files case by case: FASTER, SLOWER, SAME or UNSURE, from the intervals of both.

    Exit code: 0; 1 with --fail-if-slower if a case is slower, or went wrong or away since; 2 for files that cannot be
    read or compared.
    """
    before, after = load(old), load(new)
    changes = compare(before, after, across_devices=across_devices)
    differences = Table("environment", "old", "new", title="what differs between the machines", title_justify="left")
    for row in environment_differences(before, after):
        differences.add_row(*map(escape, row))
    output.print(differences if differences.row_count else "Both were measured in the same environment.")
    output.print(table(changes))
    counts = Counter(c.comparison.verdict.name if c.comparison else "without a figure" for c in changes)
    output.print(", ".join(f"{count} {name}" for name, count in counts.items()), **PLAIN)
    slower = [c for c in changes if fail_if_slower is not None and c.slower_than(fail_if_slower)]
    for change in slower:
        output.print(f"[red]slower than allowed:[/red] {escape(change.label)}", **PLAIN)
    lost = [c for c in changes if fail_if_slower is not None and c.lost]
    for change in lost:
        output.print(f"[red]no figure any more:[/red] {escape(change.label)}, {escape(change.missing)}", **PLAIN)
    if slower or lost:
        raise typer.Exit(1)


def table(changes: list[Change]) -> Table:
    """One row per case and implementation; those without a figure in either file are left out."""
    styles = {Verdict.FASTER: "green", Verdict.SLOWER: "red", Verdict.SAME: "", Verdict.UNSURE: "yellow"}
    found = Table("what", "verdict", "speedup", "at least", "at most", title="new beside old", title_justify="left")
    for change in changes:
        if change.comparison is None:
            if not change.missing.startswith("both"):
                found.add_row(escape(change.label), escape(change.missing))
            continue
        style, s = styles[change.comparison.verdict], change.comparison.speedup
        verdict = change.comparison.verdict.name
        figures = (f"{x:.3f}x" for x in (s.median, s.low, s.high))
        found.add_row(escape(change.label), f"[{style}]{verdict}[/{style}]" if style else verdict, *figures)
    return found
