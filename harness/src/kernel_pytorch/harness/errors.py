"""The error that the user can mend."""

from __future__ import annotations


class UserError(ValueError, LookupError):
    """A name, file, option or installation that cannot be used. The message says what was given and what is allowed.

    `kernel-pytorch` prints it in one line and ends with exit code 2.
    """


def said(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
