"""Implementations beside each other: proven right, timed in turns, and proven right again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernel_pytorch.harness.clock import Timing, compare_paired, median_interval
from kernel_pytorch.harness.machine import Machine
from kernel_pytorch.harness.oracle import Judgement
from kernel_pytorch.harness.profiling.placement import local_machine
from kernel_pytorch.harness.quick.inputs import REPEATED, Arguments, Pool
from kernel_pytorch.harness.quick.judging import BUDGET_FACTOR, check, expect, problem
from kernel_pytorch.harness.quick.records import Comparison, Contender
from kernel_pytorch.harness.quick.timed import held_against, time_together
from kernel_pytorch.harness.results import ComparisonRecord, IntervalRecord
from kernel_pytorch.harness.timing import ROUNDS

AFTER = "after timing, on fresh inputs: "
REMEMBERS = "after timing, on new values in memory that it had seen: "


@dataclass(frozen=True)
class Candidate:
    """One implementation before it was measured.

    Attributes:
        name: for tables.
        function: what is called; None if it cannot run or be timed here.
        reason: why it cannot.
        budget_factor: how many times the reference's own error is allowed.
    """

    name: str
    function: Callable[..., Any] | None
    reason: str = ""
    budget_factor: float = BUDGET_FACTOR


def compare_implementations(
    implementations: Mapping[str, Callable[..., Any]],
    *args: Any,
    reference: str | None = None,
    rounds: int = ROUNDS,
    machine: Machine | None = None,
    **kwargs: Any,
) -> Comparison:
    """Time several implementations of one function in turns, and only those that compute it.

    Before it is timed, each is held against the reference, evaluated in float64 where it runs in float64, and must
    leave its inputs alone; one that fails is not timed. Each call that is timed finds values that were never there
    before, so nothing is gained by remembering results. Afterwards each is checked again on fresh inputs, once in
    memory that it has seen before with other values; the time of one that fails now is struck out.

    Args:
        implementations: functions by name, each called as `function(*args, **kwargs)`, without gradients.
        *args: tensors and plain values, also in lists, tuples and dictionaries.
        reference: name of the implementation that defines what is right, and that speedups are over; the first if None.
        rounds: samples per implementation.
        machine: the limits that shares are of; measured now, once per process, if None.
        **kwargs: as `args`, by name (`reference`, `rounds` and `machine` are taken).

    Raises:
        ValueError: no implementations, no such reference, or one that writes into its inputs or returns nothing that
            can be compared; `rounds` is below what an interval needs.
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
        title: what is compared.
        candidates: in the order of the table.
        reference: name of one of them that can run.
        arguments: what they are called with.
        rounds: samples per implementation.
        machine: the limits that shares are of.
        moved: bytes that each must move; those of arguments and results if None.
    """
    machine = machine or local_machine(str(arguments.device))
    functions = {c.name: c.function for c in candidates if c.function is not None}
    values = Pool(arguments, 1)
    expected = expect(functions[reference], arguments, values.sets[0])
    before = {
        c.name: check(c.function, arguments, values.sets[0], expected, c.budget_factor)
        for c in candidates
        if c.function is not None
    }
    right = {name: function for name, function in functions.items() if not problem(before[name])}
    if reference not in right:
        raise ValueError(f"the reference {reference!r} differs from itself: {problem(before[reference])}")
    timings, moved, pool = time_together(right, arguments, rounds=rounds, moved=moved)
    after = _check_again([c for c in candidates if c.name in right], functions[reference], arguments, values, pool)
    contenders, notes = [], [] if pool.varies else [REPEATED]
    for c in candidates:
        found = _untimed(c, before.get(c.name, []))
        if c.name in timings:
            found = _timed(c, before[c.name], after[c.name], timings, reference)
            share, too_fast = held_against(timings[c.name], moved, machine.ceilings, arguments.dtype_name)
            if found.status == "measured":
                found = found.model_copy(update={"share_of_copy": share})
                notes += [f"{c.name}: {too_fast}"] if too_fast else []
        contenders.append(found)
    return Comparison(
        title=title,
        device=machine.environment.device_name,
        inputs=arguments.labels,
        reference=reference,
        tolerance=expected.tolerance(c.budget_factor for c in candidates if c.function is not None),
        bytes=moved,
        pool_bytes=timings[reference].pool_bytes,
        contenders=tuple(contenders),
        notes=tuple(notes),
    )


def _check_again(
    candidates: Sequence[Candidate], reference: Callable[..., Any], arguments: Arguments, values: Pool, pool: Pool
) -> dict[str, str]:
    """What is wrong with each after it was timed, empty if nothing is."""
    values.refresh()
    expected = expect(reference, arguments, values.sets[0])
    found = {}
    for c in candidates:
        assert c.function is not None
        # It has seen this memory hundreds of times, with other values.
        pool.write(0, values)
        seen = check(c.function, arguments, pool.sets[0], expected, c.budget_factor, in_place=True)
        new = check(c.function, arguments, values.sets[0], expected, c.budget_factor)
        found[c.name] = REMEMBERS + problem(seen) if problem(seen) else AFTER + problem(new) if problem(new) else ""
    return found


def _untimed(candidate: Candidate, judgements: Sequence[Judgement]) -> Contender:
    if candidate.function is None:
        return Contender(name=candidate.name, status="unavailable", reason=candidate.reason)
    relative, over = _errors(judgements)
    return Contender(
        name=candidate.name,
        status="wrong",
        reason=problem(judgements),
        relative_error=relative,
        error_over_budget=over,
    )


def _timed(
    candidate: Candidate, judgements: Sequence[Judgement], wrong: str, timings: Mapping[str, Timing], reference: str
) -> Contender:
    timing, baseline = timings[candidate.name], timings[reference]
    comparison = None
    # Times of different methods are different quantities.
    if not wrong and candidate.name != reference and timing.method == baseline.method:
        comparison = ComparisonRecord.of(compare_paired(baseline.samples, timing.samples))
    relative, over = _errors(judgements)
    return Contender(
        name=candidate.name,
        status="wrong" if wrong else "measured",
        reason=wrong,
        seconds=IntervalRecord.of(median_interval(timing.samples)),
        samples=timing.samples,
        method=timing.method,
        comparison=comparison,
        relative_error=relative,
        error_over_budget=over,
    )


def _errors(judgements: Sequence[Judgement]) -> list[float | None]:
    """Worst relative error, worst error over budget; None where infinite, which JSON cannot hold."""
    worst = (
        max((j.relative_error for j in judgements), default=0.0),
        max((j.error_over_budget for j in judgements), default=0.0),
    )
    return [value if math.isfinite(value) else None for value in worst]
