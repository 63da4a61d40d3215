"""Mutation testing: replace a level of an operation by a wrong function, and verify.

A check that was never seen failing proves nothing, so the tests of a technique plant wrong functions and expect the
lines that name them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernel_pytorch.harness.exemptions import SUPPORT_ROWS, of_levels
from kernel_pytorch.harness.technique import Implementation, Level, Operation, Point, Technique
from kernel_pytorch.harness.verification import verify

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Mutant(Implementation):
    """A function that need not be importable.

    Attributes:
        function: takes the arguments of the operation.
    """

    function: Callable[..., Any]

    def load(self) -> Callable[..., Any]:
        """The function."""
        return self.function


def failures_of(
    technique: Technique,
    operation: str,
    function: Callable[..., Any],
    *,
    level: Level = Level.NATIVE,
    points: Callable[[Point], Point | None] = lambda point: point,
    adversarial: bool = True,
    budget_factor: float = 2.0,
) -> list[str]:
    """Check a function against an operation's reference, as `kernel-pytorch verify --device cpu` does.

    If the operation has a public function, that calls the mutant as it calls the level.

    Args:
        technique: declares the operation.
        operation: its name.
        function: takes the arguments of the level.
        level: the level that it replaces; at `Level.TRITON` its launches are counted.
        points: maps each point of the test grid to the one to run, or None to leave it out.
        adversarial: whether to use adversarial inputs.
        budget_factor: how many times the reference's own error is allowed: that of the replaced level.

    Returns:
        One line for each thing that is wrong, naming level, case and quantity; none if the function is right.

    Raises:
        ValueError: nothing ran: no point in float32 is left, or the level cannot run here.
    """
    declared = technique.operation(operation)
    kept = tuple(chosen for point in declared.test_grid.points if (chosen := points(point)) is not None)
    changed = dataclasses.replace(
        declared,
        **_levels(declared, level, function, budget_factor, adversarial),
        test_grid=dataclasses.replace(declared.test_grid, points=kept),
        roles=declared.roles if adversarial else {"written": declared.roles.get("written", ())},
    )
    stand = contextlib.nullcontext()
    if declared.function:
        stand = technique.ladder().replaced(operation, level.value, function)
    with stand:
        found = list(verify(dataclasses.replace(technique, operations=[changed]), CPU, levels=[level.value]))
    if all(v.unavailable is not None for v in found):
        reasons = sorted({v.unavailable for v in found if v.unavailable is not None})
        raise ValueError(f"{operation}: nothing was checked: {'; '.join(reasons)}")
    return [line for v in found for line in v.failures()]


def _levels(
    declared: Operation, level: Level, function: Callable[..., Any], budget_factor: float, adversarial: bool
) -> dict[str, Any]:
    """The reference and the level of the mutant, as fields of an operation; support is not verified."""
    name, reason = level.value, "that of the level that it replaces"
    kept = [e for e in declared.exemptions if (adversarial or not e.of_adversary) and e.what[0] not in SUPPORT_ROWS]
    if declared.function:
        levels: list[Any] = [Level.REFERENCE.value, name]
        return {"levels": levels, "budgets": {name: (budget_factor, reason)}, "exemptions": of_levels(kept, levels)}
    planted = Mutant(name, level, f"{__name__}:planted", budget_factor, reason, function=function)
    return {"levels": [declared.reference, planted], "exemptions": of_levels(kept, [declared.reference.name, name])}
