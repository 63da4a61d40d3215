"""Checks of a function's results against a reference, in float64 where the reference runs in float64."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_pytorch.harness.errors import said
from kernel_pytorch.harness.oracle import ErrorCheck, Run, in_float64, judge, run
from kernel_pytorch.harness.quick.inputs import Arguments

BUDGET_FACTOR = 4.0
"""The largest that the harness allows: no factor was declared for these implementations."""

IN_FLOAT64 = (
    "{factors} times the error of the reference itself, against the reference in float64, "
    "plus one unit in the last place"
)
AS_TESTING = "the tolerances of torch.testing.assert_close around the reference, because {reason}"


@dataclass(frozen=True)
class Expectation:
    """The results of the reference for one set of inputs.

    Attributes:
        reference: in the dtype of the inputs.
        truth: in float64, or None.
        reason: why there is no truth.
    """

    reference: Run
    truth: Run | None
    reason: str = ""

    def tolerance(self, factors: Iterable[float]) -> str:
        """The allowed error in words, for implementations with these factors."""
        if self.truth is None:
            return AS_TESTING.format(reason=self.reason)
        return IN_FLOAT64.format(factors=" or ".join(f"{factor:g}" for factor in sorted(set(factors))))


def expect(reference: Callable[..., Any], arguments: Arguments, leaves: Sequence[Any]) -> Expectation:
    """Run the reference on these leaves and, if possible, in float64.

    Raises:
        ValueError: it writes into its inputs, so nothing can be compared with it, or returns what cannot be compared.
    """
    found = _observe(reference, arguments, leaves)
    if found.written:
        raise ValueError(f"the reference wrote into {', '.join(found.written)}; give one that leaves its inputs alone")
    try:
        exact = copy.deepcopy(reference).double() if isinstance(reference, torch.nn.Module) else reference
        truth = _observe(exact, arguments, in_float64(leaves))
    except Exception as error:
        reason = f"the reference does not run in float64 ({said(error)})"
        return Expectation(found, None, reason)
    reason = _why_no_truth(found.outputs, truth.outputs)
    return Expectation(found, None if reason else truth, reason)


def check(
    function: Callable[..., Any],
    arguments: Arguments,
    leaves: Sequence[Any],
    expected: Expectation,
    factor: float,
    *,
    in_place: bool = False,
) -> list[ErrorCheck]:
    """Run a function and judge its results; one that raises is wrong.

    Args:
        function: the candidate.
        arguments: how it is called.
        leaves: what it is called with.
        expected: the results of the reference for the same leaves.
        factor: how many times the reference's own error is allowed.
        in_place: pass these tensors, not copies, which reveals functions that remember results by address.
    """
    try:
        if in_place:
            with torch.no_grad():
                candidate = Run(_outputs(arguments.call(function, leaves)), {})
        else:
            candidate = _observe(function, arguments, leaves)
    except Exception as error:
        message = f"raised {said(error)}"
        return [ErrorCheck("call", False, error_over_budget=math.inf, message=message)]
    if expected.truth is not None:
        return judge(candidate, expected.reference, expected.truth, factor)
    found = judge(candidate, expected.reference, expected.reference, factor)
    ours, theirs = candidate.quantities(), expected.reference.quantities()
    return [j if math.isinf(j.error_over_budget) else _close(j, ours[j.quantity], theirs[j.quantity]) for j in found]


def problem(error_checks: Sequence[ErrorCheck]) -> str:
    """All that is wrong, empty if nothing is."""
    return "; ".join(f"{j.quantity} {j.message}" for j in error_checks if not j.passed)


def _close(error_check: ErrorCheck, ours: Any, theirs: Any) -> ErrorCheck:
    """The error_check by the tolerances of torch.testing instead of a budget."""
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError as error:
        message = "is off: " + " ".join(str(error).split())
        return dataclasses.replace(error_check, passed=False, error_over_budget=math.inf, message=message)
    return dataclasses.replace(error_check, passed=True, error_over_budget=0.0, message="")


def _observe(function: Callable[..., Any], arguments: Arguments, leaves: Sequence[Any]) -> Run:
    """The outputs for copies of the leaves, and the names of those that were written into."""
    return run(lambda *own: _outputs(arguments.call(function, own)), arguments.names, leaves)


def _outputs(result: Any) -> tuple[Tensor, ...]:
    """Tensors and numbers of a result, in order."""
    found = []
    for leaf in tree_leaves(result):
        if isinstance(leaf, bool | int | float):
            leaf = torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
        if not isinstance(leaf, Tensor):
            raise TypeError(f"it returned {type(leaf).__name__}; only tensors and numbers can be compared")
        found.append(leaf.detach())
    if not found:
        raise TypeError("it returned no tensor and no number, so there is nothing to compare")
    return tuple(found)


def _why_no_truth(reference: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> str:
    """Why the results for float64 inputs are no truth, empty if they are one."""
    for theirs, exact in zip(reference, truth, strict=True):
        if not (theirs.is_floating_point() or theirs.is_complex()):
            continue
        if exact.dtype not in (torch.float64, torch.complex128):
            return f"the reference returns {exact.dtype} for float64 inputs"
        if theirs.dtype == exact.dtype:
            return "the inputs are in float64 already"
        if torch.equal(exact, exact.to(theirs.dtype).to(exact.dtype)):
            return f"the reference has no more digits in float64 than in {theirs.dtype}: it is exact, or casts inside"
    return ""
