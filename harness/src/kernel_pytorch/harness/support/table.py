"""The support table as people read it, merged over all devices that were asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from kernel_pytorch.harness.support.capabilities import CAPABILITIES
from kernel_pytorch.harness.support.record import Outcome, SupportRecord
from kernel_pytorch.harness.technique import Operation, Technique

NOT_TESTED = "not tested here"


class Notes:
    """Reasons, numbered in the order in which a table meets them."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def number(self, reason: str) -> int:
        """The number of a reason; the same one for the same reason."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason) + 1


def cell(found: Sequence[tuple[str, Outcome]], notes: Notes) -> str:
    """What a table says of one row and one implementation.

    Args:
        found: device and outcome; what was tested somewhere counts, wherever it was not.
        notes: receives the reasons.
    """
    tested = [(device, o) for device, o in found if o.answer != NOT_TESTED]
    answers = list(dict.fromkeys(o.answer for _, o in tested))
    if not tested:
        return f"{NOT_TESTED} ({notes.number(found[0][1].reason)})" if found else NOT_TESTED
    parts = []
    for answer in answers:
        same = [(device, o) for device, o in tested if o.answer == answer]
        numbers = sorted({notes.number(o.reason) for _, o in same if o.reason})
        where = f" on {', '.join(device for device, _ in same)}" if len(answers) > 1 else ""
        parts.append(answer + where + (f" ({', '.join(map(str, numbers))})" if numbers else ""))
    return "; ".join(parts)


def columns(operation: Operation, records: Iterable[SupportRecord]) -> list[str]:
    """The implementations that could run on one of the devices, in the order of the ladder."""
    ran = {o.implementation for record in records for o in record.outcomes if o.operation == operation.name}
    return [i.name for i in operation.implementations if i.name in ran]


def rows(operation: Operation, records: Sequence[SupportRecord], notes: Notes) -> list[list[str]]:
    """One row per capability: its name, then a cell for each of `columns`."""
    found: dict[tuple[str, str], list[tuple[str, Outcome]]] = {}
    for record in records:
        for o in record.outcomes:
            if o.operation == operation.name:
                device = record.environment.device_name
                found.setdefault((o.capability, o.implementation), []).append((device, o))
    names = columns(operation, records)
    return [[c.name, *(cell(found.get((c.name, name), []), notes) for name in names)] for c in CAPABILITIES]


def absences(operation: Operation, records: Sequence[SupportRecord]) -> list[str]:
    """Implementations that could run nowhere, with the reasons."""
    there = columns(operation, records)
    reasons: dict[str, dict[str, None]] = {}
    for record in records:
        for a in record.absent:
            if a.operation == operation.name and a.implementation not in there:
                reasons.setdefault(a.implementation, {})[a.reason] = None
    return [f"`{name}` is not here: {'; '.join(found)}" for name, found in reasons.items()]


def markdown(technique: Technique, records: Sequence[SupportRecord]) -> str:
    """The tables of all operations, for a page; operations of which the same is true share one."""
    lines = []
    for record in records:
        e = record.environment
        triton = f", triton {e.triton}{' in its interpreter' if e.triton_interpret else ''}" if e.triton else ""
        lines.append(f"Tested on {e.device_name} with torch {e.torch}{triton}, on {record.created[:10]}.  ")
    lines.append("")
    found: dict[tuple[str, ...], list[str]] = {}
    for operation in technique.operations:
        found.setdefault(tuple(_table(operation, records)), []).append(f"`{operation.name}`")
    for table, names in found.items():
        lines += [f"**{', '.join(names)}**", "", *table]
    return "\n".join(lines).rstrip() + "\n"


def _table(operation: Operation, records: Sequence[SupportRecord]) -> list[str]:
    """The lines of the table of one operation, and what its numbers mean."""
    notes = Notes()
    names = columns(operation, records)
    lines = [f"| | {' | '.join(names)} |", "|" + " --- |" * (len(names) + 1)]
    lines += [f"| {' | '.join(row)} |" for row in rows(operation, records, notes)]
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(notes.reasons, 1)), ""]
    said = absences(operation, records)
    return [*lines, *(f"{line}.  " for line in said), *[""] * bool(said)]


def terminal_table(operation: Operation, record: SupportRecord) -> tuple[Table, list[str]]:
    """The table of one operation on one device, and the lines below it."""
    notes = Notes()
    table = Table(title=operation.name, title_justify="left")
    for name in ("", *columns(operation, [record])):
        table.add_column(name)
    for row in rows(operation, [record], notes):
        table.add_row(*(f"[red]{text}[/red]" if text.startswith("wrong") else text for text in row))
    numbered = [f"({number}) {reason}" for number, reason in enumerate(notes.reasons, 1)]
    return table, [*numbered, *absences(operation, [record])]
