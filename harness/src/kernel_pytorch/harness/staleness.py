"""Which figures are of sources that have changed since, and whether users rest on them.

Times of a GPU depend on its kernels alone, and stand as long as these do; all others depend on everything that a call
runs. A level that is the default somewhere rests on the record that its package's table names: where the kernels of
such a level are neither those that were measured nor carried, that is an error, and everything else is only told.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_pytorch.harness.results import Results
from kernel_pytorch.harness.sources import kernels_digest, technique_digests
from kernel_pytorch.harness.technique import Level, Technique


@dataclass(frozen=True)
class Stale:
    """One implementation whose sources are no longer those that were measured.

    Attributes:
        label: `operation/implementation`.
        what: has changed.
        created: when it was measured.
        default: whether it is the default of that operation on that device, and its kernels have changed.
    """

    label: str
    what: str
    created: str
    default: bool

    def __str__(self) -> str:
        """One line for people."""
        rests = "; it is the default there, which rests on this record" if self.default else ""
        return f"{self.label}, measured on {self.created[:10]}: {self.what}{rests}"


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
    found = []
    for label, run in _measured(results).items():
        created = results.runs[run].created if results.runs else results.created
        known = results.kernels.get(label, "")
        same = bool(known) and known == kernels.get(label)
        if label not in paths:
            found.append(Stale(label, "it no longer exists", created, default=False))
        elif paths[label] != results.sources.get(label):
            if same and kind == "cuda":
                found.append(Stale(label, "what is around its kernels has changed", created, default=False))
            else:
                found.append(Stale(label, "its kernels have changed", created, default=label in defaults and not same))
    return found


def default_levels(technique: Technique, record: str) -> set[str]:
    """The implementations, as `operation/level`, that a package's table makes a default by this record."""
    rows: Any = getattr(technique.ladder(), "defaults", ())
    return {
        f"{operation.name}/{row.level}"
        for row in rows
        if row.record == record
        for operation in technique.operations
        if row.functions is None or operation.name in row.functions
    }


def _measured(results: Results) -> dict[str, int]:
    """The implementations that have times, and the latest run that they are of; peers are not ours to keep fresh."""
    found: dict[str, int] = {}
    for m in results.measurements:
        if m.status == "measured" and m.level != Level.PEER.value:
            label = f"{m.operation}/{m.implementation}"
            found[label] = max(m.run, found.get(label, 0))
    return found
