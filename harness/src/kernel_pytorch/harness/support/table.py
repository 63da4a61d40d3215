"""The support table of an operation, merged over all devices that were tested."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_pytorch.harness.report import markdown_table
from kernel_pytorch.harness.support.examination import CAPABILITIES
from kernel_pytorch.harness.support.record import Outcome, SupportRecord
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
