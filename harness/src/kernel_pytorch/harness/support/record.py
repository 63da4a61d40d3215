"""The record of what is supported: one JSON file per technique and device."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from kernel_pytorch.harness.environment import Environment
from kernel_pytorch.harness.records import Identity, Name, Part, Record, check_once

SCHEMA_VERSION: Literal[1] = 1
FOLDER = "support"
"""Beside the results of a device, which are read file by file."""

Answer = Literal["yes", "no", "not tested here", "wrong"]


class _About(Part):
    operation: Name
    implementation: Name

    @property
    def label(self) -> str:
        """`operation/implementation`."""
        return f"{self.operation}/{self.implementation}"


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


class Absent(_About):
    """An implementation that cannot run on this device."""

    reason: str


class SupportRecord(Record):
    """Everything that was found out about one technique on one device.

    Attributes:
        identities: what identifies each implementation, by `operation/implementation`; empty in files that are older.
        outcomes: one per row for each implementation that can run here.
        absent: those that cannot.
    """

    kind = f"a support record of schema version {SCHEMA_VERSION}"
    former = frozenset({"sources"})

    schema_version: Literal[1] = SCHEMA_VERSION
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
