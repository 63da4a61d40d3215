"""The record of what is supported: one JSON file per technique and device, and the tables of all devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.environment import Environment
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.exemptions import SUPPORT_ROWS
from kernel_pytorch.harness.provenance import identify
from kernel_pytorch.harness.records import Identity, Name, Part, Record, check_once
from kernel_pytorch.harness.report import markdown_table
from kernel_pytorch.harness.technique import Operation, Technique

FOLDER = "support"
"""Beside the results of a device, which are read file by file."""

NOT_TESTED = "not tested here"
Answer = Literal["yes", "no", "not tested here", "wrong"]


class _About(Part):
    operation: Name
    implementation: Name

    @property
    def label(self) -> str:
        """`operation/implementation`."""
        return f"{self.operation}/{self.implementation}"


class Absent(_About):
    """An implementation that cannot run on this device."""

    reason: str


class Outcome(_About):
    """The answer for one row and one implementation of an operation.

    Attributes:
        answer: "yes"; "no", as it was declared; "not tested here", because only another machine can tell; "wrong": the
            result contradicts the declaration.
        reason: that of the declaration, or why it was not tested, or what is wrong.
        error: what was raised, if anything was.
    """

    capability: Name
    answer: Answer
    reason: str = ""
    error: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from the others of a record."""
        return self.operation, self.implementation, self.capability


class SupportRecord(Record):
    """Everything that was found out about one technique on one device.

    Attributes:
        identities: what identifies each implementation, by `operation/implementation`; empty in files that are older.
        outcomes: one per row for each implementation that can run here.
        absent: those that cannot.
    """

    kind = "a support record of schema version 1"
    former = frozenset({"sources"})

    schema_version: Literal[1] = 1
    technique: Name
    created: str
    environment: Environment
    identities: dict[Name, Identity] = Field(default_factory=dict)
    outcomes: tuple[Outcome, ...]
    absent: tuple[Absent, ...] = ()

    @model_validator(mode="after")
    def _check_rows(self) -> SupportRecord:
        check_once(o.key for o in self.outcomes)
        return self

    def save_in(self, folder: Path) -> Path:
        """Write `folder/support/<technique>.json`; return its path."""
        path = folder / FOLDER / f"{self.technique}.json"
        self.save(path)
        return path

    def wrong(self) -> list[str]:
        """One line for each outcome that the declaration contradicts."""
        return [
            f"{self.technique} {o.operation} level {o.implementation!r}, {o.capability}: {o.reason}"
            + (f": {o.error}" if o.error else "")
            for o in self.outcomes
            if o.answer == "wrong"
        ]


load = SupportRecord.load


def load_all(results: Path, technique: str) -> dict[Path, SupportRecord]:
    """The records of a technique on all devices: `results/<device>/support/<technique>.json`.

    Raises:
        UserError: one of them cannot be read.
    """
    return {path: load(path) for path in sorted(results.glob(f"*/{FOLDER}/{technique}.json"))}


def up_to_date(record: SupportRecord, technique: Technique) -> tuple[SupportRecord, list[str]]:
    """The record without what was found out about code that has changed since, and what that is.

    What cannot be identified here is taken as it is, and so is a record that is older than identities.
    """
    now = identify(technique, record.environment, compiling=False) if record.identities else {}
    declared = {f"{o.name}/{i.name}" for o in technique.operations for i in o.implementations}
    changed = {
        name
        for name, then in record.identities.items()
        if name not in declared or (name in now and then.differs(now[name]))
    }
    kept = tuple(o for o in record.outcomes if o.label not in changed)
    absent = tuple(a for a in record.absent if a.label in declared)
    return record.model_copy(update={"outcomes": kept, "absent": absent}), sorted(changed)


def recorded(technique: Technique, results: Path) -> list[SupportRecord]:
    """The records of a technique on all devices, without what is out of date.

    Raises:
        UserError: a record cannot be read, or holds what is wrong.
    """
    records = [up_to_date(record, technique)[0] for record in load_all(results, technique.name).values()]
    if wrong := [line for record in records for line in record.wrong()]:
        raise UserError(f"a record with wrong outcomes is not published: {'; '.join(wrong)}")
    return [record for record in records if record.outcomes]


def problems(name: str, results: Path) -> list[str]:
    """What is not recorded of the present code of an installed technique; empty if everything is.

    A record that is out of date does not count, and is no problem as long as another one speaks of that code.

    Raises:
        UserError: as `recorded`.
        UserError: the technique is not installed.
    """
    technique = discover().get(name)
    known = {each.label for r in recorded(technique, results) for each in (*r.outcomes, *r.absent)}
    every = load_all(results, name).items()
    changed = {what: path for path, record in every for what in up_to_date(record, technique)[1]}
    again = f"`kernel-pytorch support {name} --changed --json results/<device>` asks again"
    declared = (f"{o.name}/{i.name}" for o in technique.operations for i in o.implementations if not i.partial)
    return [
        f"{changed[each]}: {each} has changed since; {again}" if each in changed else f"{each} is not recorded; {again}"
        for each in declared
        if each not in known
    ]


def tabulate(
    operation: Operation, records: Sequence[SupportRecord]
) -> tuple[list[str], list[list[str]], list[str], list[str]]:
    """The table of an operation, from the records of all devices.

    Returns:
        The header, with the implementations that could run on one of the devices; a row for each of `SUPPORT_ROWS`; the
        reasons that cells give by number, from 1 on; one line for each implementation that could run nowhere.
    """
    found: dict[tuple[str, str], list[tuple[str, Outcome]]] = {}
    why: dict[str, dict[str, None]] = {}
    for record in records:
        for o in record.outcomes:
            if o.operation == operation.name:
                found.setdefault((o.capability, o.implementation), []).append((record.environment.device_name, o))
        for a in record.absent:
            if a.operation == operation.name:
                why.setdefault(a.implementation, {})[a.reason] = None
    ran = {level for _, level in found}
    levels = [i.name for i in operation.implementations if i.name in ran]
    reasons: dict[str, int] = {}
    rows = [[row, *(_cell(found.get((row, level), []), reasons) for level in levels)] for row in SUPPORT_ROWS]
    absent = [f"`{level}` is not here: {'; '.join(each)}" for level, each in why.items() if level not in ran]
    return ["", *levels], rows, list(reasons), absent


def _cell(found: Sequence[tuple[str, Outcome]], reasons: dict[str, int]) -> str:
    """The answers for one row and level by device; a device that could not test it counts only if none could."""
    tested = [(device, o) for device, o in found if o.answer != NOT_TESTED] or found[:1]
    devices: dict[str, list[str]] = {}
    numbers: dict[str, set[int]] = {}
    for device, o in tested:
        devices.setdefault(o.answer, []).append(device)
        given = numbers.setdefault(o.answer, set())
        if o.reason:
            given.add(reasons.setdefault(o.reason, len(reasons) + 1))
    parts = []
    for answer, on in devices.items():
        where = f" on {', '.join(on)}" if len(devices) > 1 else ""
        parts.append(answer + where + (f" ({', '.join(map(str, sorted(numbers[answer])))})" if numbers[answer] else ""))
    return "; ".join(parts) or NOT_TESTED


def markdown(technique: Technique, records: Sequence[SupportRecord]) -> str:
    """The tables of all operations, for a page; operations with equal tables share one."""
    lines = []
    for record in records:
        e = record.environment
        triton = f", triton {e.triton}{' in its interpreter' if e.triton_interpret else ''}" if e.triton else ""
        lines.append(f"Tested on {e.device_name} with torch {e.torch}{triton}, on {record.created[:10]}.  ")
    lines.append("")
    names: dict[str, list[str]] = {}
    for operation in technique.operations:
        header, rows, reasons, absent = tabulate(operation, records)
        table = [f"| | {' | '.join(header[1:])} |", *markdown_table(header, rows)[1:], ""]
        table += [*(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)), ""]
        table += [*(f"{line}.  " for line in absent), *[""] * bool(absent)]
        names.setdefault("\n".join(table), []).append(f"`{operation.name}`")
    for shared, sharing in names.items():
        lines += [f"**{', '.join(sharing)}**", "", shared]
    return "\n".join(lines).rstrip() + "\n"
