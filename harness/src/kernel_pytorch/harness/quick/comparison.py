"""Functions on the harness's clock: one alone, or several that are checked, timed in turns and checked again."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernel_pytorch.harness.clock import (
    Subject,
    Timing,
    compare_paired,
    measure,
    median_interval,
    on_clock_stream,
    sets_needed,
)
from kernel_pytorch.harness.clock.sampling import LONGEST_PASS, SHORTEST_SAMPLE
from kernel_pytorch.harness.clock.statistics import FEWEST_ROUNDS
from kernel_pytorch.harness.machine import Ceilings, Machine
from kernel_pytorch.harness.oracle import ErrorCheck
from kernel_pytorch.harness.profiling.placement import TOO_FAST, local_machine
from kernel_pytorch.harness.quick.inputs import REPEATED, Arguments, Pool, touched_bytes
from kernel_pytorch.harness.quick.proof import BUDGET_FACTOR, check, expect, problem
from kernel_pytorch.harness.quick.records import Benchmark, Comparison, Contender
from kernel_pytorch.harness.results import ComparisonRecord, IntervalRecord
from kernel_pytorch.harness.roofline import attain, faster_than_physics
from kernel_pytorch.harness.timing import MEMORY_LIMIT, ROUNDS

AFTER = "after timing, on fresh inputs: "
REMEMBERS = "after timing, on new values in memory that it had seen: "
MOST_SETS = 2048
MOST_WARM_UP = 1.0  # seconds for one call on every set


@dataclass(frozen=True)
class Candidate:
    """One implementation to be measured.

    Attributes:
        name: for tables.
        function: None if it cannot run or be timed here.
        reason: why it cannot.
        budget_factor: how many times the reference's own error is allowed.
    """

    name: str
    function: Callable[..., Any] | None
    reason: str = ""
    budget_factor: float = BUDGET_FACTOR


def quick_benchmark(
    function: Callable[..., Any], *args: Any, rounds: int = ROUNDS, machine: Machine | None = None, **kwargs: Any
) -> Benchmark:
    """Time one function, called without gradients.

    The inputs of each call are outside the cache, with values that no call has seen before: they are copies of the
    given ones, scaled. To time a backward, write it into the function, under `torch.enable_grad()`.

    Args:
        function: takes `args` and `kwargs`. On CUDA, one that waits for the GPU is timed with its launch gaps.
        *args: tensors and plain values, also in lists, tuples and dictionaries.
        rounds: samples.
        machine: the limits that shares are of; measured now, once per process, if None.
        **kwargs: as `args`, by name (`rounds` and `machine` are taken).

    Raises:
        ValueError: `rounds` is below what an interval needs.
        TypeError: `rounds` is no whole number.
    """
    arguments = Arguments.of(args, kwargs)
    machine = machine or local_machine(str(arguments.device))
    name = name_of(function)
    times = time_together({name: function}, arguments, rounds=rounds)
    timing, record = times.timings[name], times.record(name)
    share, too_fast = times.held_against(name, machine.ceilings, arguments.dtype_name)
    return Benchmark(
        name=name,
        device=machine.environment.device_name,
        inputs=arguments.labels,
        **record,
        calls_per_sample=timing.calls_per_sample,
        pool_bytes=timing.pool_bytes,
        bytes=times.moved,
        bytes_per_second=times.moved / record["seconds"].median,
        share_of_copy=share,
        problem=too_fast,
        notes=times.notes,
    )


def compare_implementations(
    implementations: Mapping[str, Callable[..., Any]],
    *args: Any,
    reference: str | None = None,
    rounds: int = ROUNDS,
    machine: Machine | None = None,
    **kwargs: Any,
) -> Comparison:
    """Time several implementations of one function in turns; only those that compute it are timed.

    Before it is timed, each is checked against the reference, evaluated in float64 if it runs in float64, and must not
    write into its inputs; one that fails is not timed. Each timed call gets values that no call has seen before, so
    remembered results gain nothing. Afterwards each is checked again on fresh inputs, and in memory that it has seen
    before with other values; the time of one that fails now is struck out.

    Args:
        implementations: functions by name, each called as `function(*args, **kwargs)`, without gradients.
        *args: tensors and plain values, also in lists, tuples and dictionaries.
        reference: name of the implementation that defines what is right and is the base of speedups; the first if None.
        rounds: samples per implementation.
        machine: the limits that shares are of; measured now, once per process, if None.
        **kwargs: as `args`, by name (`reference`, `rounds` and `machine` are taken).

    Raises:
        ValueError: no implementations, no such reference, or one that writes into its inputs or returns nothing that
            can be compared; `rounds` is below what an interval needs.
        TypeError: `rounds` is no whole number.
    """
    if not implementations:
        raise ValueError("implementations is empty; give functions by name")
    names = list(implementations)
    reference = names[0] if reference is None else reference
    if reference not in names:
        raise ValueError(f"reference is {reference!r}; the implementations are {', '.join(names)}")
    candidates = [Candidate(name, function) for name, function in implementations.items()]
    title = " / ".join(names) if len(names) <= 4 else f"{len(names)} implementations"
    return compare_candidates(title, candidates, reference, Arguments.of(args, kwargs), rounds=rounds, machine=machine)


def compare_candidates(
    title: str,
    candidates: Sequence[Candidate],
    reference: str,
    arguments: Arguments,
    *,
    rounds: int = ROUNDS,
    machine: Machine | None = None,
    moved: int | None = None,
) -> Comparison:
    """See `compare_implementations`.

    Args:
        title: of the table.
        candidates: in the order of the table.
        reference: name of one of them that can run.
        arguments: what they are called with.
        rounds: samples per implementation.
        machine: the limits that shares are of.
        moved: bytes that each must move; those of arguments and results if None.
    """
    machine = machine or local_machine(str(arguments.device))
    runnable = {c.name: c for c in candidates if c.function is not None}
    functions = {name: c.function for name, c in runnable.items() if c.function is not None}
    values = Pool(arguments, 1)
    expected = expect(functions[reference], arguments, values.sets[0])
    before = {
        name: check(function, arguments, values.sets[0], expected, runnable[name].budget_factor)
        for name, function in functions.items()
    }
    right = {name: function for name, function in functions.items() if not problem(before[name])}
    if reference not in right:
        raise ValueError(f"the reference {reference!r} differs from itself: {problem(before[reference])}")
    times = time_together(right, arguments, rounds=rounds, moved=moved)
    values.refresh()
    again = expect(functions[reference], arguments, values.sets[0])
    contenders, notes = [], [*times.notes]
    for c in candidates:
        found = _contender(c, before.get(c.name, []))
        if c.name in right:
            # The pool's memory has been used hundreds of times, with other values.
            times.pool.write(0, values)
            seen = check(right[c.name], arguments, times.pool.sets[0], again, c.budget_factor, in_place=True)
            new = check(right[c.name], arguments, values.sets[0], again, c.budget_factor)
            wrong = REMEMBERS + problem(seen) if problem(seen) else AFTER + problem(new) if problem(new) else ""
            share, too_fast = times.held_against(c.name, machine.ceilings, arguments.dtype_name)
            timed = {"status": "measured", "share_of_copy": share, "comparison": times.compared(c.name, reference)}
            found = found.model_copy(update={**times.record(c.name), "reason": wrong, **({} if wrong else timed)})
            notes += [f"{c.name}: {too_fast}"] if too_fast and not wrong else []
        contenders.append(found)
    return Comparison(
        title=title,
        device=machine.environment.device_name,
        inputs=arguments.labels,
        reference=reference,
        tolerance=expected.tolerance(c.budget_factor for c in runnable.values()),
        bytes=times.moved,
        pool_bytes=times.timings[reference].pool_bytes,
        contenders=tuple(contenders),
        notes=tuple(notes),
    )


def _contender(candidate: Candidate, error_checks: Sequence[ErrorCheck]) -> Contender:
    """An implementation before it is timed."""
    if candidate.function is None:
        return Contender(name=candidate.name, status="unavailable", reason=candidate.reason)
    worst = [
        max((getattr(j, name) for j in error_checks), default=0.0) for name in ("relative_error", "error_over_budget")
    ]
    relative, over = (value if math.isfinite(value) else None for value in worst)  # JSON holds no infinity
    reason = problem(error_checks)
    return Contender(
        name=candidate.name, status="wrong", reason=reason, relative_error=relative, error_over_budget=over
    )


@dataclass(frozen=True)
class Times:
    """Timings of functions on the same input sets.

    Attributes:
        timings: by name.
        moved: bytes that a call must move.
        pool: the input sets.
    """

    timings: dict[str, Timing]
    moved: int
    pool: Pool

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence if the inputs could not be varied."""
        return () if self.pool.varies else (REPEATED,)

    def record(self, name: str) -> dict[str, Any]:
        """The fields of a record that every timing has."""
        timing = self.timings[name]
        seconds = IntervalRecord.of(median_interval(timing.samples))
        return {"seconds": seconds, "samples": timing.samples, "method": timing.method}

    def compared(self, name: str, reference: str) -> ComparisonRecord | None:
        """The speedup over the reference; None for itself and for a method that measures another quantity."""
        ours, theirs = self.timings[name], self.timings[reference]
        if name == reference or ours.method != theirs.method:
            return None
        return ComparisonRecord.of(compare_paired(theirs.samples, ours.samples))

    def held_against(self, name: str, ceilings: Ceilings, dtype_name: str) -> tuple[float | None, str]:
        """The share of the copy rate that a timing attains, or None and why its rate cannot be true."""
        timing = self.timings[name]
        attained = attain(self.moved, 0, statistics.median(timing.samples), ceilings, timing.pool_bytes, dtype_name)
        impossible = faster_than_physics(attained)
        return (None, f"{TOO_FAST} ({impossible})") if impossible else (attained.share_of_copy, "")


def time_together(
    functions: Mapping[str, Callable[..., Any]], arguments: Arguments, *, rounds: int, moved: int | None = None
) -> Times:
    """Time functions in turns, without gradients, all on the same input sets.

    Args:
        functions: by name; each takes the arguments.
        arguments: what the input sets are copies of.
        rounds: samples per function.
        moved: bytes that a call must move; those of arguments and results if None.

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
        first, trial = next(iter(functions.values())), Pool(arguments, 2)
        result = arguments.call(first, trial.sets[0])
        moved = touched_bytes(arguments, result, first) if moved is None else moved
        # On new values each time: a function that remembers results would look short, and be called far too often.
        seconds = _seconds(lambda: arguments.call(first, trial.sets[1]), device, trial.refresh)
        # Each function keeps its last result of every set, so the limit is shared.
        limit = MEMORY_LIMIT[device.type] // (2 * len(functions))
        pool = Pool(arguments, sets_for(moved, seconds, device, limit))
        prepared = [arguments.unflatten(leaves) for leaves in pool.sets]
        subjects = [
            Subject(name, functools.partial(_call, function, prepared), len(pool.sets), moved)
            for name, function in functions.items()
        ]
        return Times(measure(subjects, device, rounds=rounds, refresh=pool.refresh), moved, pool)


def _call(function: Callable[..., Any], prepared: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], index: int) -> Any:
    positional, named = prepared[index]
    return function(*positional, **named)


def sets_for(bytes_per_set: int, seconds_per_call: float, device: torch.device, memory_limit_bytes: int) -> int:
    """The number of input sets: enough to be cold, and on a CPU for one pass to last as long as a sample must.

    Fewer if one call on every set would take longer than `MOST_WARM_UP`.
    """
    sets = sets_needed(max(bytes_per_set, 1), device, memory_limit_bytes=memory_limit_bytes)
    if device.type == "cpu":
        wanted = min(math.ceil(SHORTEST_SAMPLE / seconds_per_call), MOST_SETS)
        sets = max(sets, min(wanted, memory_limit_bytes // max(bytes_per_set, 1)))
    return max(2, min(sets, math.ceil(MOST_WARM_UP / seconds_per_call)))


def _seconds(call: Callable[[], object], device: torch.device, prepare: Callable[[], None]) -> float:
    """About how long one call takes: the shortest of five, or of fewer that take `LONGEST_PASS` together."""
    found: list[float] = []
    while len(found) < 5 and sum(found) <= LONGEST_PASS:
        prepare()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begin)
    return max(min(found), 1e-7)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in tables."""
    return getattr(function, "__name__", type(function).__name__)
