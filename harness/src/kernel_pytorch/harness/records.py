"""The base of all records: one JSON file each, read with its faults named, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kernel_pytorch.harness.errors import UserError

if TYPE_CHECKING:
    from typing_extensions import Self

RecordError = UserError

Amount = Annotated[float, Field(ge=0.0)]
Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(pattern=r"^[^<>\[\]|`\n]*$")]
"""Text that tables, pages and terminals print as it is."""


class Part(BaseModel):
    """A part of a record: immutable, and without fields that it does not declare.

    Attributes:
        former: names of fields that older files have, and that are read over.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    former: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _without_former(cls, data: Any) -> Any:
        if not cls.former or not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if name not in cls.former}

    def to_json(self) -> str:
        """All of it."""
        return self.model_dump_json(indent=1)


class Identity(Part):
    """What an implementation consists of.

    Attributes:
        made_by: the compiler, or the torch that runs it, with its version: "Triton 3.7.1", "nvcc 13.0", "torch 2.13.0".
        sources: digests of what was compiled or runs, by operator of C++ or name of the level's module; none of Triton.
        kernels: digests of what the compiler made of it, by bench case (Triton) or operator (C++). These are compared
            where both sides have them, and only if one compiler made both.
    """

    made_by: Name
    sources: dict[Name, str] = Field(default_factory=dict)
    kernels: dict[str, str] = Field(default_factory=dict)

    def differs(self, other: Identity) -> bool:
        """Whether another identity is one of other code."""
        common = self.kernels.keys() & other.kernels.keys() if self.made_by == other.made_by else ()
        return self.sources != other.sources or any(self.kernels[case] != other.kernels[case] for case in common)


class Record(Part):
    """What a file holds.

    Attributes:
        kind: what messages call such a file.
    """

    kind: ClassVar[str] = "a record"

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            UserError: it cannot be read, is no such record, or holds what no record can hold: an infinite number or
                one that is none, a negative amount, a row twice, a name with markup in it.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse, object_pairs_hook=_once)
            return cls.model_validate(found)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "file"
            raise UserError(f"{path}: not {cls.kind} ({where}: {first['msg']})") from error
        except ValueError as error:  # no text, no JSON, or a number or key that was refused
            raise UserError(f"{path}: not {cls.kind} (file: {error})") from error

    def save(self, path: Path) -> None:
        """Write the file in one step: a crash half-way leaves the previous file whole."""
        write_atomically(path, self.to_json() + "\n")


def check_once(rows: Iterable[Hashable]) -> None:
    """Raise ValueError if a row is there twice; rows are given by what tells them apart."""
    row, count = next(iter(Counter(rows).most_common(1)), (None, 1))
    if count > 1:
        raise ValueError(f"{count} times the row {row}")


def write_atomically(path: Path, text: str) -> None:
    """Write beside the target, then rename over it; folders that are missing are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of a measurement")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    check_once(key for key, _ in pairs)
    return dict(pairs)
