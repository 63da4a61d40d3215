"""Comparison of the levels of an installed technique on one case."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernel_pytorch.harness.api import check_names
from kernel_pytorch.harness.availability import parse_device, why_not_timed
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.machine import Machine
from kernel_pytorch.harness.quick.comparison import Candidate, compare_candidates
from kernel_pytorch.harness.quick.inputs import Arguments
from kernel_pytorch.harness.quick.records import Comparison
from kernel_pytorch.harness.results import CaseRecord
from kernel_pytorch.harness.technique import Case, Direction, Implementation, Level, Operation, Technique
from kernel_pytorch.harness.timing import ROUNDS


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
        UserError: no such technique, operation, case, level or device, or the name fits several; the message
            lists them.
        TypeError: `levels` is one name, or `rounds` no whole number.
    """
    where = parse_device(None if device is None else str(device))
    technique, found = _operation(operation)
    chosen = case if isinstance(case, Case) else _case(found, case, where)
    implementations = _chosen(found, levels)
    if any(i.level is Level.COMPILE for i in implementations):
        torch._dynamo.reset()  # past eight shapes torch.compile would give up
    generator = torch.Generator(where).manual_seed(0)
    return compare_candidates(
        f"{technique.name}.{found.name}, {CaseRecord.of(chosen).label}",
        [_candidate(technique, i, where, chosen.dtype) for i in implementations],
        found.reference.name,
        Arguments.of(found.arguments(chosen, generator)),
        rounds=rounds,
        machine=machine,
        moved=found.cost(chosen, Direction.FORWARD).bytes,
    )


def _operation(name: str) -> tuple[Technique, Operation]:
    first, dot, second = name.partition(".")
    technique = discover().get(first)
    names = [o.name for o in technique.operations]
    dotted = ", ".join(f"{first}.{n}" for n in names)
    if not dot:
        if len(names) > 1:
            raise UserError(f"{first} has {len(names)} operations; name one of them: {dotted}")
        return technique, technique.operations[0]
    if second not in names:
        raise UserError(f"no operation {name!r}; there are: {dotted}")
    return technique, technique.operation(second)


def _chosen(operation: Operation, levels: Sequence[str] | None) -> list[Implementation]:
    names = [i.name for i in operation.implementations]
    check_names(operation.name, "level", levels, names)
    wanted = {*(names if levels is None else levels), operation.reference.name}
    return [i for i in operation.implementations if i.name in wanted]


def _case(operation: Operation, name: str | None, device: torch.device) -> Case:
    cases = [*operation.bench_grid.cases(device.type), *operation.test_grid.cases(device.type)]
    if name is None:
        return next(case for case in operation.test_grid.cases(device.type) if case.core)
    fitting = [c for c in cases if name in (c.label, CaseRecord.of(c).label)] or [c for c in cases if c.name == name]
    if len(fitting) != 1:
        what = f"no case {name!r}" if not fitting else f"{len(fitting)} cases are named {name!r}"
        listed = "; ".join(dict.fromkeys(CaseRecord.of(c).label for c in fitting or cases))
        raise UserError(f"{operation.name}: {what}; there are: {listed}")
    return fitting[0]


def _candidate(
    technique: Technique, implementation: Implementation, device: torch.device, dtype: torch.dtype
) -> Candidate:
    reason = why_not_timed(technique, implementation, device, dtype)
    function = None if reason is not None else implementation.load()
    return Candidate(implementation.name, function, reason or "", implementation.budget_factor)
