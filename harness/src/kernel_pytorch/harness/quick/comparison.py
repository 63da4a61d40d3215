"""Functions on the harness's clock: one alone, or several that are checked, timed in turns and checked again."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernel_pytorch.harness.api import check_names
from kernel_pytorch.harness.availability import parse_device, why_not_timed
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
from kernel_pytorch.harness.clock.wall import wait_for
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.machine import Machine, attain, faster_than_physics
from kernel_pytorch.harness.profiling.cost import TOO_FAST, local_machine
from kernel_pytorch.harness.quick.inputs import (
    BUDGET_FACTOR,
    REPEATED,
    Arguments,
    Pool,
    allowed,
    check,
    expect,
    problem,
    touched_bytes,
)
from kernel_pytorch.harness.quick.records import Benchmark, Comparison, Contender
from kernel_pytorch.harness.results import CaseRecord
from kernel_pytorch.harness.technique import Case, Direction, Level, Operation, Technique
from kernel_pytorch.harness.timing import MEMORY_LIMIT, ROUNDS

AFTER = "after timing, on fresh inputs: "
REMEMBERS = "after timing, on new values in memory that it had seen: "
MOST_SETS = 2048
MOST_WARM_UP = 1.0  # seconds for one call on every set

Candidate = tuple[Callable[..., Any] | None, str, float]
"""A function, or None and the reason why it cannot be timed here; how many times the reference's error it may err."""


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
    timings, moved, pool = time_together({"": function}, arguments, rounds=rounds)
    record, too_fast = _timed(timings[""], moved, machine, arguments)
    return Benchmark(
        name=name_of(function),
        device=machine.environment.device_name,
        inputs=arguments.labels,
        **record,
        calls_per_sample=timings[""].calls_per_sample,
        pool_bytes=timings[""].pool_bytes,
        bytes=moved,
        bytes_per_second=moved / record["seconds"].median,
        problem=too_fast,
        notes=() if pool.varies else (REPEATED,),
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
    candidates: dict[str, Candidate] = {name: (f, "", BUDGET_FACTOR) for name, f in implementations.items()}
    title = " / ".join(names) if len(names) <= 4 else f"{len(names)} implementations"
    return _compare(title, candidates, reference, Arguments.of(args, kwargs), rounds, machine)


def compare_levels(
    operation: str,
    case: Case | str | None = None,
    *,
    levels: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    rounds: int = ROUNDS,
    machine: Machine | None = None,
) -> Comparison:
    """Time every level of an operation in turns, forward, each proven right before and after.

    A level that cannot run or be timed here appears with its reason. `kernel-pytorch bench` measures all cases, and
    backwards too.

    Args:
        operation: name of a technique, where it has one operation, or "technique.operation".
        case: a `Case`, or the name or label that a case of the bench or test grid is printed with; None for the first
            core case of the test grid.
        levels: names of the levels to compare; all of them if None. The reference is always there.
        device: cpu or cuda; CUDA where there is a GPU if None.
        rounds: samples per level.
        machine: the limits that shares are of; measured now, once per process, if None.

    Raises:
        UnknownNameError: no such technique, operation, case, level or device, or the name fits several; the message
            lists them.
        TypeError: `levels` is one name, or `rounds` no whole number.
    """
    where = parse_device(None if device is None else str(device))
    technique, found = _operation(operation)
    chosen = case if isinstance(case, Case) else _case(found, case, where)
    names = [i.name for i in found.implementations]
    check_names(found.name, "level", levels, names)
    wanted = {*(names if levels is None else levels), found.reference.name}
    implementations = [i for i in found.implementations if i.name in wanted]
    if any(i.level is Level.COMPILE for i in implementations):
        torch._dynamo.reset()  # past eight shapes torch.compile would give up
    candidates: dict[str, Candidate] = {}
    for i in implementations:
        reason = why_not_timed(technique, i, where, chosen.dtype)
        candidates[i.name] = (i.load() if reason is None else None, reason or "", i.budget_factor)
    title = f"{technique.name}.{found.name}, {CaseRecord.of(chosen).label}"
    arguments = Arguments.of(found.arguments(chosen, torch.Generator(where).manual_seed(0)))
    moved = found.cost(chosen, Direction.FORWARD).bytes
    return _compare(title, candidates, found.reference.name, arguments, rounds, machine, moved)


def _operation(name: str) -> tuple[Technique, Operation]:
    first, dot, second = name.partition(".")
    technique = discover().get(first)
    names = [o.name for o in technique.operations]
    dotted = ", ".join(f"{first}.{n}" for n in names)
    if not dot and len(names) > 1:
        raise UserError(f"{first} has {len(names)} operations; name one of them: {dotted}")
    if dot and second not in names:
        raise UserError(f"no operation {name!r}; there are: {dotted}")
    return technique, technique.operation(second or names[0])


def _case(operation: Operation, name: str | None, device: torch.device) -> Case:
    tested = operation.test_grid.cases(device.type)
    cases = [*operation.bench_grid.cases(device.type), *tested]
    if name is None:
        return next(case for case in tested if case.core)
    fitting = [c for c in cases if name in (c.label, CaseRecord.of(c).label)] or [c for c in cases if c.name == name]
    if len(fitting) != 1:
        what = f"no case {name!r}" if not fitting else f"{len(fitting)} cases are named {name!r}"
        listed = "; ".join(dict.fromkeys(CaseRecord.of(c).label for c in fitting or cases))
        raise UserError(f"{operation.name}: {what}; there are: {listed}")
    return fitting[0]


def _compare(
    title: str,
    candidates: Mapping[str, Candidate],
    reference: str,
    arguments: Arguments,
    rounds: int,
    machine: Machine | None,
    moved: int | None = None,
) -> Comparison:
    """Compare candidates, of which the reference can run; `moved` is the bytes that each must move, if declared."""
    machine = machine or local_machine(str(arguments.device))
    functions = {name: function for name, (function, *_) in candidates.items() if function is not None}
    factors = {name: candidates[name][2] for name in functions}
    values = Pool(arguments, 1)
    expected = expect(functions[reference], arguments, values.sets[0])
    before = {name: check(f, arguments, values.sets[0], expected, factors[name]) for name, f in functions.items()}
    right = {name: function for name, function in functions.items() if not problem(before[name])}
    if reference not in right:
        raise ValueError(f"the reference {reference!r} differs from itself: {problem(before[reference])}")
    timings, moved, pool = time_together(right, arguments, rounds=rounds, moved=moved)
    values.refresh()
    again = expect(functions[reference], arguments, values.sets[0])
    contenders, notes = [], [] if pool.varies else [REPEATED]
    for name, (function, reason, factor) in candidates.items():
        if function is None:
            contenders.append(Contender(name=name, status="unavailable", reason=reason))
            continue
        errors = [max(getattr(j, each) for j in before[name]) for each in ("relative_error", "error_over_budget")]
        relative, over = (error if math.isfinite(error) else None for error in errors)  # JSON holds no infinity
        fields: dict[str, Any] = {"status": "wrong", "reason": problem(before[name])}
        if name in right:
            pool.write(0, values)  # memory that has been used hundreds of times, with other values
            seen = problem(check(function, arguments, pool.sets[0], again, factor, in_place=True))
            new = problem(check(function, arguments, values.sets[0], again, factor))
            record, too_fast = _timed(timings[name], moved, machine, arguments)
            fields |= record | {"reason": REMEMBERS + seen if seen else AFTER + new if new else ""}
            if fields["reason"]:
                fields["share_of_copy"] = None
            else:
                notes += [f"{name}: {too_fast}"] if too_fast else []
                ours, theirs = timings[name], timings[reference]  # times of other methods are other quantities
                timed_alike = name != reference and ours.method == theirs.method
                ratios = compare_paired(theirs.samples, ours.samples) if timed_alike else None
                fields |= {"status": "measured", "comparison": ratios}
        contenders.append(Contender(name=name, relative_error=relative, error_over_budget=over, **fields))
    return Comparison(
        title=title,
        device=machine.environment.device_name,
        inputs=arguments.labels,
        reference=reference,
        tolerance=allowed(expected, factors.values()),
        bytes=moved,
        pool_bytes=timings[reference].pool_bytes,
        contenders=tuple(contenders),
        notes=tuple(notes),
    )


def _timed(timing: Timing, moved: int, machine: Machine, arguments: Arguments) -> tuple[dict[str, Any], str]:
    """The fields of a record that every timing has, and why its rate cannot be true, or ""."""
    seconds = median_interval(timing.samples)
    attained = attain(moved, 0, seconds.median, machine.ceilings, timing.pool_bytes, arguments.dtype_name)
    impossible = faster_than_physics(attained)
    share = None if impossible else attained.share_of_copy
    fields = {"seconds": seconds, "samples": timing.samples, "method": timing.method, "share_of_copy": share}
    return fields, f"{TOO_FAST} ({impossible})" if impossible else ""


def time_together(
    functions: Mapping[str, Callable[..., Any]], arguments: Arguments, *, rounds: int, moved: int | None = None
) -> tuple[dict[str, Timing], int, Pool]:
    """Time functions in turns, without gradients, all on the same input sets.

    Args:
        functions: by name; each takes the arguments.
        arguments: what the input sets are copies of.
        rounds: samples per function.
        moved: bytes that a call must move; those of arguments and results if None.

    Returns:
        Timings by name, the bytes that a call must move, and the input sets.

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

        def subject(name: str, function: Callable[..., Any]) -> Subject:
            return Subject(name, lambda i: function(*prepared[i][0], **prepared[i][1]), len(prepared), moved)

        subjects = list(itertools.starmap(subject, functions.items()))
        return measure(subjects, device, rounds=rounds, refresh=pool.refresh), moved, pool


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
        wait_for(device)
        begin = time.perf_counter()
        call()
        wait_for(device)
        found.append(time.perf_counter() - begin)
    return max(min(found), 1e-7)


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in tables."""
    return getattr(function, "__name__", type(function).__name__)
