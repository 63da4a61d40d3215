"""Which records of what is supported are of the present code."""

from __future__ import annotations

from pathlib import Path

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.provenance import identify
from kernel_pytorch.harness.support.record import SupportRecord, load_all
from kernel_pytorch.harness.technique import Technique


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
    kept = tuple(o for o in record.outcomes if f"{o.operation}/{o.implementation}" not in changed)
    absent = tuple(a for a in record.absent if f"{a.operation}/{a.implementation}" in declared)
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
    known: set[str] = set()
    for record in recorded(technique, results):
        known |= {f"{o.operation}/{o.implementation}" for o in record.outcomes}
        known |= {f"{a.operation}/{a.implementation}" for a in record.absent}
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
