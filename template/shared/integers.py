"""Arithmetic of launches. What Triton offers for it unpacks constants of kernels: microseconds a call on the host."""

from __future__ import annotations


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is no less than `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()
