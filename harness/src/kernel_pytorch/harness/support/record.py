"""The record of what is supported: one JSON file per technique and device."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from kernel_pytorch.harness.environment import Environment
from kernel_pytorch.harness.results import ResultsError, write_atomically

SCHEMA_VERSION: Literal[1] = 1
FOLDER = "support"
"""Beside the results of a device, which are read file by file."""

Answer = Literal["yes", "no", "not tested here", "wrong"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Outcome(_Record):
    """What came out for one row and one implementation of an operation.

    Attributes:
        answer: "yes"; "no", as it was declared; "not tested here", because only another machine can tell; "wrong": the
            declaration says another thing.
        reason: that of the declaration, or why it was not tested, or what is wrong.
        error: what was raised, if anything was.
    """

    operation: str
    implementation: str
    capability: str
    answer: Answer
    reason: str = ""
    error: str = ""


class Absent(_Record):
    """An implementation that cannot run on this device."""

    operation: str
    implementation: str
    reason: str


class SupportRecord(_Record):
    """Everything that was found out about one technique on one device.

    Attributes:
        sources: SHA-256 of the files that each implementation consists of, by `operation/implementation`.
        outcomes: one per row for each implementation that can run here.
        absent: those that cannot.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    technique: str
    created: str
    environment: Environment
    sources: dict[str, str]
    outcomes: tuple[Outcome, ...]
    absent: tuple[Absent, ...] = ()

    def save(self, folder: Path) -> Path:
        """Write `folder/support/<technique>.json` in one step; return its path."""
        path = folder / FOLDER / f"{self.technique}.json"
        write_atomically(path, self.model_dump_json(indent=1) + "\n")
        return path

    def wrong(self) -> list[str]:
        """One line for each outcome that the declaration contradicts."""
        return [
            f"{self.technique} {o.operation} level {o.implementation!r}, {o.capability}: {o.reason}"
            + (f": {o.error}" if o.error else "")
            for o in self.outcomes
            if o.answer == "wrong"
        ]


def load(path: Path) -> SupportRecord:
    """Read a record.

    Raises:
        ResultsError: it cannot be read, is no record, or has another schema version.
    """
    try:
        return SupportRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ResultsError(f"{path}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise ResultsError(
            f"{path}: not a support record of schema version {SCHEMA_VERSION} ({where}: {first['msg']})"
        ) from error


def load_all(results: Path, technique: str) -> dict[Path, SupportRecord]:
    """The records of a technique on all devices: `results/<device>/support/<technique>.json`.

    Raises:
        ResultsError: one of them cannot be read.
    """
    return {path: load(path) for path in sorted(results.glob(f"*/{FOLDER}/{technique}.json"))}
