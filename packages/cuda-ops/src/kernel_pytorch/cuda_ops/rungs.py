"""Choice of the numbered kernel in csrc/*/kernels that runs; only comparisons of these kernels need it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .operators import operators


@contextmanager
def rung(number: int) -> Iterator[None]:
    """Let the operators that this thread calls launch the kernel of that number.

    Args:
        number: as the kernel's file begins; 0 is the launcher's own choice. Where an operator has no kernel of that
            number for a shape, its call raises RuntimeError. On a CPU nothing changes: the CPU backend is one.
    """
    former = operators.choose_rung(number)
    try:
        yield
    finally:
        operators.choose_rung(former)
