"""Which figures are of other code than the present one, and whether users rest on them.

A level that is the default somewhere rests on the record that its package's table names: it is an error if its code is
known to be other than what was measured, or if it was not measured at all. Everything else is only listed. A record
that is older than identities says nothing about its code.
"""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kernel_pytorch.harness.environment import Environment
from kernel_pytorch.harness.models.record import Record as Models
from kernel_pytorch.harness.provenance import fingerprint
from kernel_pytorch.harness.records import Identity
from kernel_pytorch.harness.results import Results
from kernel_pytorch.harness.technique import Level, Technique

WIDTH = 80

Identify = Callable[[Technique, Environment], dict[str, Identity]]
"""What identifies the present implementations of a technique; `provenance.identify`."""


class Change(enum.Enum):
    """How an implementation differs from what was measured; the value is what people read."""

    CODE = "the code has changed"
    UNMEASURED = "never measured there"
    ABSENT = "not known here"
    MAKER = "another compiler or torch than the one here"
    GONE = "no longer declared"
    BEFORE = "measured before records named the code that ran"


@dataclass(frozen=True)
class Stale:
    """One implementation that is not known to be what was measured.

    Attributes:
        label: `operation/implementation`; of whole models `model/work/technique`.
        change: what is different.
        created: when it was measured; of what was not, when the record was written.
        default: whether it is a default by this record.
    """

    label: str
    change: Change
    created: str
    default: bool = False

    @property
    def fails(self) -> bool:
        """Whether users run code that was not measured."""
        return self.default and self.change not in (Change.MAKER, Change.BEFORE)


def stale(results: Results, technique: Technique, place: Path, identify: Identify) -> list[Stale]:
    """What of a results file is not known to be of the present code.

    Args:
        results: what the file holds.
        technique: the one that is installed.
        place: of the file; its folder's name is what a table of defaults calls the record.
        identify: identifies the present implementations.
    """
    present = identify(technique, results.machine.environment) if results.identities else {}
    defaults = default_levels(technique, place.parent.name)
    declared = {f"{o.name}/{i.name}" for o in technique.operations for i in o.implementations}
    measured: dict[str, int] = {}  # and the latest run that each is of; peers are not ours to keep fresh
    for m in results.measurements:
        if m.status == "measured" and m.level != Level.PEER.value:
            label = f"{m.operation}/{m.implementation}"
            measured[label] = max(m.run, measured.get(label, 0))
    found = []
    for label, run in measured.items():
        if label not in declared:
            change: Change | None = Change.GONE
        else:
            change = _change(results.identities.get(label), present.get(label))
        if change is not None:
            created = results.runs[run].created if results.runs else results.created
            found.append(Stale(label, change, created, label in defaults))
    unmeasured = sorted(defaults - set(measured))
    return found + [Stale(label, Change.UNMEASURED, results.created, True) for label in unmeasured]


def _change(then: Identity | None, now: Identity | None) -> Change | None:
    if then is None:
        return Change.BEFORE
    if now is None:
        return Change.ABSENT
    if then.differs(now):
        return Change.CODE
    return Change.MAKER if then.made_by != now.made_by else None


def stale_models(record: Models, techniques: Iterable[Technique], identify: Identify) -> list[Stale]:
    """What of the figures of whole models is not known to be of the present code; no default rests on them.

    Args:
        record: what the file holds.
        techniques: those that are installed.
        identify: identifies the present implementations.
    """
    here = {technique.name: technique for technique in techniques}
    found = []
    for name, run in {**record.runs, **{f"{model}/losses": run for model, run in record.losses.items()}}.items():
        if not run.identities:
            found.append(Stale(name, Change.BEFORE, run.date))
        for package, then in run.identities.items():
            if package not in here:
                found.append(Stale(f"{name}/{package}", Change.ABSENT, run.date))
            elif fingerprint(now := identify(here[package], run.environment)) != then:
                # One digest holds all kernels, and another compiler makes another one of the same code.
                compiler = f"Triton {(run.environment.triton or '').partition('+')[0]}"
                same = all(i.sources or i.made_by == compiler for i in now.values())
                found.append(Stale(f"{name}/{package}", Change.CODE if same else Change.MAKER, run.date))
    return found


def default_levels(technique: Technique, record: str) -> set[str]:
    """The implementations, as `operation/level`, that a package's table makes a default by this record."""
    return {
        f"{o.name}/{row.level}"
        for row in getattr(technique.ladder(), "defaults", ()) if row.record == record
        for o in technique.operations if row.functions is None or o.name in row.functions
        if any(i.name == row.level for i in o.implementations)
    }  # fmt: skip


def listing(found: Mapping[Path, Iterable[Stale]]) -> list[str]:
    """Lines of at most 80 characters: by file, change and date, one for each operation; what fails goes first."""
    lines = []
    for file, every in sorted(found.items(), key=lambda pair: not any(each.fails for each in pair[1])):
        kinds: dict[str, dict[str, list[str]]] = {}
        for each in sorted(every, key=lambda each: not each.fails):
            kind = f"{'FAILS, default' if each.fails else 'listed'}, {each.created[:10]}: {each.change.value}"
            operation, _, level = each.label.rpartition("/")
            named = kinds.setdefault(kind, {})
            if each.change is not Change.BEFORE:
                named.setdefault(operation, []).append(level)
        lines += [str(file)] if kinds else []
        for kind, operations in kinds.items():
            lines.append(f"  {kind}")
            for operation, levels in operations.items():
                about = f"{operation}: {', '.join(levels)}"
                lines += textwrap.wrap(about, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 6)
    return lines


def remedies(found: Mapping[Path, Iterable[Stale]]) -> list[str]:
    """What to do about defaults that fail, as commands; empty if none does."""
    failing = {file: count for file, every in found.items() if (count := sum(each.fails for each in every))}
    if not failing:
        return []
    count = sum(failing.values())
    return [
        "",
        f"{count} default{' rests' if count == 1 else 's rest'} on code that was not measured. Measure it"
        " again, on the device of the record:",
        *(f"  on {file.parent.name}: kernel-pytorch bench {file.stem} --full" for file in failing),
    ]
