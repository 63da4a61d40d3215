"""The support table of an operation, merged over all devices that were tested."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.provenance import identify
from kernel_pytorch.harness.report import markdown_table
from kernel_pytorch.harness.support.examination import CAPABILITIES
from kernel_pytorch.harness.support.record import Outcome, SupportRecord, load_all
from kernel_pytorch.harness.technique import Operation, Technique

NOT_TESTED = "not tested here"


def tabulate(
    operation: Operation, records: Sequence[SupportRecord]
) -> tuple[list[str], list[list[str]], list[str], list[str]]:
    """The table of an operation, from the records of all devices.

    Returns:
        The header, with the implementations that could run on one of the devices; a row for each capability; the
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
    rows = [[c.name, *(_cell(found.get((c.name, level), []), reasons) for level in levels)] for c in CAPABILITIES]
    absent = [f"`{level}` is not here: {'; '.join(each)}" for level, each in why.items() if level not in ran]
    return ["", *levels], rows, list(reasons), absent


def _cell(found: Sequence[tuple[str, Outcome]], reasons: dict[str, int]) -> str:
    """The answers for one row and level by device; a device that could not test it counts only if none could."""

    def number(reason: str) -> int:
        return reasons.setdefault(reason, len(reasons) + 1)

    tested = [(device, o) for device, o in found if o.answer != NOT_TESTED]
    if not tested:
        return f"{NOT_TESTED} ({number(found[0][1].reason)})" if found else NOT_TESTED
    answers = list(dict.fromkeys(o.answer for _, o in tested))
    parts = []
    for answer in answers:
        same = [(device, o) for device, o in tested if o.answer == answer]
        numbers = sorted({number(o.reason) for _, o in same if o.reason})
        where = f" on {', '.join(device for device, _ in same)}" if len(answers) > 1 else ""
        parts.append(answer + where + (f" ({', '.join(map(str, numbers))})" if numbers else ""))
    return "; ".join(parts)


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
    asks_again = f"`kernel-pytorch support {name} --changed --json results/<device>` asks again"
    return [
        f"{changed[what]}: {what} has changed since; {asks_again}"
        if what in changed
        else f"{what} is not recorded; {asks_again}"
        for what in (f"{o.name}/{i.name}" for o in technique.operations for i in o.implementations if not i.partial)
        if what not in known
    ]
