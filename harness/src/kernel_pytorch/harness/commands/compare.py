"""`kernel-pytorch compare`: did a change make anything slower?"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.markup import escape

from kernel_pytorch.harness.clock import Comparison, Verdict, compare_intervals
from kernel_pytorch.harness.commands.common import output, tell
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.results import Measurement, Results, load
from kernel_pytorch.harness.tables import table

STYLES = {Verdict.FASTER: "[green]", Verdict.SLOWER: "[red]", Verdict.SAME: "", Verdict.UNSURE: "[yellow]"}


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
    machines = [results.machine.environment.model_dump() for results in (before, after)]
    differing = [[name, *(str(each[name]) for each in machines)] for name in machines[0]]
    if cells := [map(escape, row) for row in differing if row[1] != row[2]]:
        output.print(table("what differs between the machines", ("environment", "old", "new"), cells, text=3))
    else:
        output.print("Both were measured in the same environment.")
    rows = []
    for change in changes:
        if change.comparison is not None:
            verdict, s = change.comparison.verdict, change.comparison.speedup
            figures = (f"{x:.3f}x" for x in (s.median, s.low, s.high))
            rows.append((escape(change.label), STYLES[verdict] + verdict.name, *figures))
        elif not change.missing.startswith("both"):
            rows.append((escape(change.label), escape(change.missing)))
    output.print(table("new beside old", ("what", "verdict", "speedup", "at least", "at most"), rows, text=5))
    counts = Counter(c.comparison.verdict.name if c.comparison else "without a figure" for c in changes)
    tell(", ".join(f"{count} {name}" for name, count in counts.items()))
    if fail_if_slower is None:
        return
    slower = [change.label for change in changes if change.slower_than(fail_if_slower)]
    lost = [f"{change.label}, {change.missing}" for change in changes if change.lost]
    tell(*slower, mark="slower than allowed")
    tell(*lost, mark="no figure any more")
    if slower or lost:
        raise typer.Exit(1)


class Change(NamedTuple):
    """One implementation on one case in both files.

    Attributes:
        label: for tables and messages.
        comparison: new beside old, or None where one of them has no figure.
        missing: which file has no figure and why, empty where both have one.
        lost: whether the old file has a figure and the new one has none: the case went wrong, or away.
    """

    label: str
    comparison: Comparison | None
    missing: str
    lost: bool

    def slower_than(self, share: float) -> bool:
        """Whether even the kindest reading of the intervals is slower by more than this share."""
        return self.comparison is not None and self.comparison.speedup.high < 1.0 / (1.0 + share)


def compare(old: Results, new: Results, *, across_devices: bool = False) -> list[Change]:
    """Pair the measurements of two files, in the order of the old one; cases that only the new one has come last.

    Raises:
        UserError: different techniques; different devices, unless `across_devices`.
    """
    if old.technique != new.technique:
        raise UserError(f"the old file is of technique {old.technique!r}, the new one of {new.technique!r}")
    devices = []
    for e in (results.machine.environment for results in (old, new)):
        devices.append(e.device_name + f" with {e.torch_threads} threads" * (e.device_type == "cpu"))
    if devices[0] != devices[1] and not across_devices:
        raise UserError(
            f"the old file was measured on {devices[0]}, the new one on {devices[1]}: a difference would tell "
            "about the devices, not about the code (--across-devices compares all the same)"
        )
    before, after = ({m.label: m for m in results.measurements} for results in (old, new))
    return [_change(label, before.get(label), after.get(label)) for label in dict.fromkeys([*before, *after])]


def _change(label: str, old: Measurement | None, new: Measurement | None) -> Change:
    times = [m and m.time for m in (old, new)]
    if times[0] and times[1] and old and new and old.method == new.method:
        return Change(label, compare_intervals(times[0], times[1]), "", lost=False)
    missing = [
        f"{which}: no such case" if m is None else f"{which}: {m.status}: {m.reason}"
        for which, m, time in zip(("old", "new"), (old, new), times, strict=True) if not time
    ]  # fmt: skip
    if old and new and old.status == new.status == "unavailable":
        missing = [f"both: {new.reason}"]
    elif old and new and not missing:
        missing = [f"timed differently: {old.method} and {new.method}"]
    return Change(label, None, "; ".join(missing), lost=bool(times[0]) and not times[1])
