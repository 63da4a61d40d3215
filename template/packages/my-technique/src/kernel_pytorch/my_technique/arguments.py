"""Checks of arguments that are this package's own. Each error says what was given and what is allowed."""

from __future__ import annotations

from ._core.arguments import check_number


def check_positive(name: str, value: float) -> None:
    """Raise TypeError or ValueError, naming the argument, unless this is a Python number, finite and above 0."""
    check_number(name, value)
    if value <= 0.0:
        raise ValueError(f"{name}: given {value}; it must be above 0")
