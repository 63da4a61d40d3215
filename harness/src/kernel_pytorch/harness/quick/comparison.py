"""Functions on the harness's clock: one alone, or several that are checked, timed in turns and checked again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kernel_pytorch.harness import clock
from kernel_pytorch.harness.api import check_names
from kernel_pytorch.harness.availability import parse_device, why_not_timed
from kernel_pytorch.harness.clock.sampling import LONGEST_PASS, SHORTEST_SAMPLE
from kernel_pytorch.harness.clock.statistics import FEWEST_ROUNDS
from kernel_pytorch.harness.clock.wall import wait_for
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.machine import Machine, attain, faster_than_physics
from kernel_pytorch.harness.profiling.cost import TOO_FAST, local_machine
from kernel_pytorch.harness.quick.inputs import Arguments, Expected, Pool, problem
from kernel_pytorch.harness.quick.records import Benchmark, Comparison, Contender
from kernel_pytorch.harness.results import CaseRecord
from kernel_pytorch.harness.technique import Case, Direction, Level, Operation
from kernel_pytorch.harness.timing import MEMORY_LIMIT, ROUNDS

AFTER = "after timing, on fresh inputs: "
REMEMBERS = "after timing, on new values in memory that it had seen: "
REPEATED = "its inputs have no floating-point value to vary: every call saw the same ones"
BUDGET_FACTOR = 4.0
"""The largest that the harness allows, for implementations that declare none."""
MOST_SETS = 2048
MOST_WARM_UP = 1.0  # seconds for one call on every set


class Candidate(NamedTuple):
    """A function, or None and why it is not timed; how many times the error of the reference its own may be."""

    function: Callable[..., Any] | None
    reason: str = ""
    factor: float = BUDGET_FACTOR


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
    """
    arguments = Arguments(args, kwargs)
    machine = machine or local_machine(str(arguments.device))
    timings, moved, pool = time_together({"": function}, arguments, rounds)
    fields, too_fast = _timed(timings[""], moved, machine, arguments)
    return Benchmark(
        name=name_of(function),
        device=machine.environment.device_name,
        inputs=arguments.labels,
        **fields,
        calls_per_sample=timings[""].calls_per_sample,
        pool_bytes=timings[""].pool_bytes,
        bytes=moved,
        bytes_per_second=moved / fields["seconds"].median,
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
        ValueError: no implementations, no such reference, or one that writes into its inputs; `rounds` is below what
            an interval needs.
        TypeError: the reference returns nothing that can be compared.
    """
    names = list(implementations)
    if not names:
        raise ValueError("implementations is empty; give functions by name")
    reference = names[0] if reference is None else reference
    if reference not in names:
        raise ValueError(f"reference is {reference!r}; the implementations are {', '.join(names)}")
    title = " / ".join(names) if len(names) <= 4 else f"{len(names)} implementations"
    candidates = {name: Candidate(function) for name, function in implementations.items()}
    return _compare(title, candidates, reference, Arguments(args, kwargs), rounds, machine)


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
        TypeError: `levels` is one name.
    """
    where = parse_device(None if device is None else str(device))
    first, _, second = operation.partition(".")
    technique = discover().get(first)
    operations = [o.name for o in technique.operations]
    if not second and len(operations) > 1:
        dotted = ", ".join(f"{first}.{name}" for name in operations)
        raise UserError(f"{first} has {len(operations)} operations; name one of them: {dotted}")
    check_names(first, "operation", [second] if second else None, operations)
    found = technique.operation(second or operations[0])
    chosen = case if isinstance(case, Case) else _case(found, case, where)
    check_names(found.name, "level", levels, [i.name for i in found.implementations])
    candidates = {}
    for i in found.implementations:
        if levels is None or i.name in levels or i is found.reference:
            reason = why_not_timed(technique, i, where, chosen.dtype)
            candidates[i.name] = Candidate(None if reason else i.load(), reason or "", i.budget_factor)
            if i.level is Level.COMPILE:
                torch._dynamo.reset()  # past eight shapes torch.compile would give up
    title = f"{technique.name}.{found.name}, {CaseRecord.of(chosen).label}"
    arguments = Arguments(found.arguments(chosen, torch.Generator(where).manual_seed(0)), {})
    moved = found.cost(chosen, Direction.FORWARD).bytes
    return _compare(title, candidates, found.reference.name, arguments, rounds, machine, moved)


def _case(operation: Operation, name: str | None, device: torch.device) -> Case:
    tested = operation.test_grid.cases(device.type)
    if name is None:
        return next(case for case in tested if case.core)
    cases = {CaseRecord.of(case).label: case for case in (*operation.bench_grid.cases(device.type), *tested)}
    fitting = {label: case for label, case in cases.items() if name in (label, case.label)}
    fitting = fitting or {label: case for label, case in cases.items() if name == case.name}
    if len(fitting) != 1:
        listed = "; ".join(fitting or cases)
        raise UserError(f"{operation.name}: {len(fitting) or 'no'} cases are named {name!r}; there are: {listed}")
    return next(iter(fitting.values()))


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
    functions = {name: c.function for name, c in candidates.items() if c.function is not None}
    values = Pool(arguments, 1)
    expected = Expected(functions[reference], arguments, values.sets[0])
    before = {name: expected.check(function, candidates[name].factor) for name, function in functions.items()}
    right = {name: function for name, function in functions.items() if not problem(before[name])}
    if reference not in right:
        raise ValueError(f"the reference {reference!r} differs from itself: {problem(before[reference])}")
    timings, moved, pool = time_together(right, arguments, rounds, moved)
    values.refresh()
    again = Expected(functions[reference], arguments, values.sets[0])
    contenders, notes = [], [] if pool.varies else [REPEATED]
    for name, (_, reason, factor) in candidates.items():
        fields: dict[str, Any] = {"status": "unavailable", "reason": reason}
        if name in functions:
            fields = {"status": "wrong", "reason": problem(before[name])}
            for each in ("relative_error", "error_over_budget"):
                worst = max(getattr(check, each) for check in before[name])
                fields[each] = worst if math.isfinite(worst) else None  # JSON holds no infinity
        if name in right:
            pool.write(values)  # memory that has been used hundreds of times, with other values
            seen = problem(again.check(right[name], factor, pool.sets[0]))
            new = problem(again.check(right[name], factor))
            timed, too_fast = _timed(timings[name], moved, machine, arguments)
            fields |= timed | {"reason": REMEMBERS + seen if seen else AFTER + new if new else ""}
            if fields["reason"]:
                fields["share_of_copy"] = None
            else:
                fields["status"] = "measured"
                notes += [f"{name}: {too_fast}"] if too_fast else []
                ours, theirs = timings[name], timings[reference]
                if name != reference and ours.method == theirs.method:  # other methods time other quantities
                    fields["comparison"] = clock.compare_paired(theirs.samples, ours.samples)
        contenders.append(Contender(name=name, **fields))
    factors = " or ".join(f"{factor:g}" for factor in sorted({candidates[name].factor for name in functions}))
    around = f"the tolerances of torch.testing.assert_close around the reference, because {expected.no_truth}"
    budget = f"{factors} times the error of the reference itself, against the reference in float64, plus one unit in " \
        "the last place"  # fmt: skip
    return Comparison(
        title=title,
        device=machine.environment.device_name,
        inputs=arguments.labels,
        reference=reference,
        tolerance=around if expected.no_truth else budget,
        bytes=moved,
        pool_bytes=timings[reference].pool_bytes,
        contenders=tuple(contenders),
        notes=tuple(notes),
    )


def _timed(timing: clock.Timing, moved: int, machine: Machine, arguments: Arguments) -> tuple[dict[str, Any], str]:
    """The fields of a record that every timing has, and why its rate cannot be true, or ""."""
    seconds = clock.median_interval(timing.samples)
    dtype = next((t.dtype for t in arguments.tensors if t.is_floating_point()), None)
    dtype_name = str(dtype).removeprefix("torch.")
    attained = attain(moved, 0, seconds.median, machine.ceilings, timing.pool_bytes, dtype_name)
    impossible = faster_than_physics(attained)
    share = None if impossible else attained.share_of_copy
    fields = {"seconds": seconds, "samples": timing.samples, "method": timing.method, "share_of_copy": share}
    return fields, f"{TOO_FAST} ({impossible})" if impossible else ""


def time_together(
    functions: Mapping[str, Callable[..., Any]], arguments: Arguments, rounds: int, moved: int | None = None
) -> tuple[dict[str, clock.Timing], int, Pool]:
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
    """
    if rounds < FEWEST_ROUNDS:
        raise ValueError(f"rounds is {rounds}; a 99% interval needs {FEWEST_ROUNDS} or more")
    device = arguments.device
    with torch.no_grad(), clock.on_clock_stream(device):
        first, trial = next(iter(functions.values())), Pool(arguments, 2)
        result = arguments.bind(first, trial.sets[0])()
        moved = arguments.touched_bytes(result, first) if moved is None else moved
        found: list[float] = []
        while len(found) < 5 and sum(found) <= LONGEST_PASS:
            # A function that remembers results would look short, and be called far too often.
            trial.refresh()
            wait_for(device)
            begin = time.perf_counter()
            arguments.bind(first, trial.sets[1])()
            wait_for(device)
            found.append(time.perf_counter() - begin)
        # Each function keeps its last result of every set, so the limit is shared.
        limit = MEMORY_LIMIT[device.type] // (2 * len(functions))
        pool = Pool(arguments, sets_for(moved, max(min(found), 1e-7), device, limit))

        def subject(name: str) -> clock.Subject:
            calls = [arguments.bind(functions[name], leaves) for leaves in pool.sets]
            return clock.Subject(name, lambda index: calls[index](), len(calls), moved)

        subjects = [subject(name) for name in functions]
        return clock.measure(subjects, device, rounds=rounds, refresh=pool.refresh), moved, pool


def sets_for(bytes_per_set: int, seconds_per_call: float, device: torch.device, memory_limit_bytes: int) -> int:
    """The number of input sets: enough to be cold, and on a CPU for one pass to last as long as a sample must.

    Fewer if one call on every set would take longer than `MOST_WARM_UP`.
    """
    sets, size = 2, max(bytes_per_set, 1)
    if device.type == "cpu":
        sets = min(math.ceil(SHORTEST_SAMPLE / seconds_per_call), MOST_SETS, memory_limit_bytes // size)
    sets = max(sets, clock.sets_needed(size, device, memory_limit_bytes=memory_limit_bytes))
    return max(2, min(sets, math.ceil(MOST_WARM_UP / seconds_per_call)))


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function in tables."""
    return getattr(function, "__name__", type(function).__name__)
