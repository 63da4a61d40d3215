"""Functions on the harness's clock, on input sets that are cold and new."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernel_pytorch.harness.clock import Subject, Timing, measure, on_clock_stream
from kernel_pytorch.harness.clock.statistics import FEWEST_ROUNDS
from kernel_pytorch.harness.machine import Ceilings
from kernel_pytorch.harness.profiling.placement import TOO_FAST
from kernel_pytorch.harness.quick.inputs import Arguments, Pool, fresh_sampler, seconds_of, sets_for, touched_bytes
from kernel_pytorch.harness.roofline import attain, faster_than_physics
from kernel_pytorch.harness.timing import MEMORY_LIMIT


def time_together(
    functions: Mapping[str, Callable[..., Any]],
    arguments: Arguments,
    *,
    rounds: int,
    moved: int | None = None,
) -> tuple[dict[str, Timing], int, Pool]:
    """Time functions in turns, without gradients, all on the same input sets.

    Args:
        functions: by name; each takes the arguments.
        arguments: what the input sets are copies of.
        rounds: samples per function.
        moved: bytes that a call must move; those of arguments and results if None.

    Returns:
        A timing per function, by name; the bytes that a call must move; the input sets.

    Raises:
        ValueError: `rounds` is below what an interval needs.
        TypeError: `rounds` is no whole number.
    """
    if not isinstance(rounds, int) or isinstance(rounds, bool):
        raise TypeError(f"rounds: given {rounds!r}; allowed are whole numbers from {FEWEST_ROUNDS} on")
    if rounds < FEWEST_ROUNDS:
        raise ValueError(f"rounds is {rounds}; a 99% interval needs {FEWEST_ROUNDS} or more")
    device = arguments.device
    with torch.no_grad(), on_clock_stream(device):
        first = next(iter(functions.values()))
        trial = Pool(arguments, 2)
        calls = _calls(first, arguments, trial)
        if moved is None:
            moved = touched_bytes(arguments, calls(0), first)
        # On new values each time: what remembers results would look short, and be called far too often.
        seconds = seconds_of(lambda: calls(1), device, trial.refresh)
        # Each function keeps its last result of every set, so the limit is shared.
        limit = MEMORY_LIMIT[device.type] // (2 * len(functions))
        pool = Pool(arguments, sets_for(moved, seconds, device, limit))
        subjects = [
            Subject(name, _calls(function, arguments, pool), len(pool.sets), moved)
            for name, function in functions.items()
        ]
        timings = measure(subjects, device, rounds=rounds, make_sampler=fresh_sampler(pool))
    return timings, moved, pool


def held_against(timing: Timing, moved: int, ceilings: Ceilings, dtype_name: str) -> tuple[float | None, str]:
    """The share of the copy rate that a timing attains, or None and why its rate cannot be true."""
    attained = attain(moved, 0, statistics.median(timing.samples), ceilings, timing.pool_bytes, dtype_name)
    impossible = faster_than_physics(attained)
    return (None, f"{TOO_FAST} ({impossible})") if impossible else (attained.share_of_copy, "")


def _calls(function: Callable[..., Any], arguments: Arguments, pool: Pool) -> Callable[[int], object]:
    calls = [arguments.unflatten(leaves) for leaves in pool.sets]

    def run(index: int) -> object:
        positional, named = calls[index]
        return function(*positional, **named)

    return run
