"""The error that the user can mend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Item = TypeVar("Item")


class UserError(ValueError, LookupError):
    """A name, file, option or installation that cannot be used. The message says what was given and what is allowed.

    `kernel-pytorch` prints it in one line and ends with exit code 2.
    """


def named(what: str, name: str, among: Mapping[str, Item]) -> Item:
    """The item of that name. Raises UserError naming those that exist."""
    if name not in among:
        raise UserError(f"{what}: given {name!r}; allowed are {', '.join(among)}")
    return among[name]


def said(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
