"""Which figures are of sources that have changed since, and whether users rest on them.

Times of a GPU depend on its kernels alone, and stand as long as these do; all others depend on everything that a call
runs. A level that is the default somewhere rests on the record that its package's table names: it is an error if the
kernels of such a level are neither those that were verified and timed nor carried. Everything else is only listed.
"""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_pytorch.harness.results import Results
from kernel_pytorch.harness.sources import kernels_digest, technique_digests
from kernel_pytorch.harness.technique import Level, Technique

WIDTH = 80


class Change(enum.Enum):
    """How an implementation differs from what was measured; the value is what people read."""

    KERNELS = "kernels changed"
    UNKNOWN = "sources changed, the record has no kernel digests"
    UNMEASURED = "never measured there"
    ABSENT = "sources not installed here"
    AROUND = "only the code around the kernels changed"
    GONE = "no longer declared"


@dataclass(frozen=True)
class Stale:
    """One implementation whose sources are not those that were measured.

    Attributes:
        label: `operation/implementation`.
        change: what is different.
        created: when it was measured; of what was not, when the record was written.
        default: whether it is a default by this record.
    """

    label: str
    change: Change
    created: str
    default: bool

    @property
    def fails(self) -> bool:
        """Whether users run kernels that were neither measured nor carried."""
        return self.default and self.change is not Change.AROUND


def stale(results: Results, technique: Technique, place: Path) -> list[Stale]:
    """What of a results file is out of date.

    Args:
        results: what the file holds.
        technique: the one that is installed.
        place: of the file; its folder's name is what a table of defaults calls the record.
    """
    kind = results.machine.environment.device_type
    paths = technique_digests(technique, kind)
    kernels = technique_digests(technique, kind, kernels_digest)
    defaults = default_levels(technique, place.parent.name)
    measured = _measured(results)
    found = []
    for label in (*measured, *sorted(defaults - set(measured))):
        if label not in measured:
            change: Change | None = Change.UNMEASURED
        elif label not in paths:
            change = Change.GONE
        else:
            change = _change(results.sources.get(label), paths[label], results.kernels.get(label), kernels[label])
        if change is not None:
            run = measured.get(label, 0)
            created = results.runs[run].created if results.runs and label in measured else results.created
            found.append(Stale(label, change, created, label in defaults))
    return found


def _change(path: str | None, path_now: str, kernels: str | None, kernels_now: str) -> Change | None:
    """What two pairs of digests say, those of a record and those of today."""
    if not path_now:
        return Change.ABSENT
    if kernels and kernels != kernels_now:
        return Change.KERNELS
    if path == path_now:
        return None
    return Change.AROUND if kernels else Change.UNKNOWN


def default_levels(technique: Technique, record: str) -> set[str]:
    """The implementations, as `operation/level`, that a package's table makes a default by this record."""
    rows: Any = getattr(technique.ladder(), "defaults", ())
    return {
        f"{operation.name}/{row.level}"
        for row in rows
        if row.record == record
        for operation in technique.operations
        if row.functions is None or operation.name in row.functions
        if any(implementation.name == row.level for implementation in operation.implementations)
    }


def _measured(results: Results) -> dict[str, int]:
    """The implementations that have times, and the latest run that they are of; peers are not ours to keep fresh."""
    found: dict[str, int] = {}
    for m in results.measurements:
        if m.status == "measured" and m.level != Level.PEER.value:
            label = f"{m.operation}/{m.implementation}"
            found[label] = max(m.run, found.get(label, 0))
    return found


def listing(found: Mapping[Path, Iterable[Stale]]) -> list[str]:
    """Lines of at most 80 characters: by file, change and date, one for each operation; what fails goes first."""
    lines = []
    for file, every in sorted(found.items(), key=lambda pair: not any(each.fails for each in pair[1])):
        kinds: dict[str, dict[str, list[str]]] = {}
        for each in sorted(every, key=lambda each: not each.fails):
            kind = f"{'FAILS, default' if each.fails else 'listed'}, {each.created[:10]}: {each.change.value}"
            operation, _, level = each.label.partition("/")
            kinds.setdefault(kind, {}).setdefault(operation, []).append(level)
        lines += [str(file)] if kinds else []
        for kind, operations in kinds.items():
            lines.append(f"  {kind}")
            for operation, levels in operations.items():
                about = f"{operation}: {', '.join(levels)}"
                lines += textwrap.wrap(about, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 6)
    return lines


def remedies(found: Mapping[Path, Iterable[Stale]], known: Mapping[Path, Results]) -> list[str]:
    """What to do about defaults that fail, as commands; empty if none does."""
    failing = {file: [each for each in every if each.fails] for file, every in found.items()}
    count = sum(map(len, failing.values()))
    if not count:
        return []
    carriable = [
        file
        for file, every in failing.items()
        if known[file].machine.environment.device_type == "cuda" and any(e.change is Change.KERNELS for e in every)
    ]
    lines = [
        "",
        f"{count} default{'s rest' if count > 1 else ' rests'} on kernels that were neither measured nor carried.",
    ]
    if carriable:
        lines += ["Carry times of a GPU where the kernels compile to what was measured:"]
        for file in carriable:
            lines += [f"  kernel-pytorch static {known[file].technique} --json {file.parent.parent}"]
            lines += [f"  kernel-pytorch report {file} --carry"]
    lines += [f"Measure {'the others ' if carriable else ''}again, on the device that the record is named after:"]
    lines += [
        f"  on {file.parent.name}: kernel-pytorch bench {known[file].technique} --full"
        for file, every in failing.items()
        if every
    ]
    return lines
