"""Whether what a function returns is right: against the reference in float64 where that can be had."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_pytorch.harness.oracle import Judgement, Run, in_float64, judge, run
from kernel_pytorch.harness.quick.inputs import Arguments

BUDGET_FACTOR = 4.0
"""The most that the harness ever allows: nobody has declared a factor for these implementations, with its reason."""

IN_FLOAT64 = "{factors} times the error of the reference itself, against the reference in float64, plus one unit in the last place"  # noqa: E501
AS_TESTING = "the tolerances of torch.testing.assert_close around the reference, because {reason}"


@dataclass(frozen=True)
class Expectation:
    """What the reference says about one set of inputs.

    Attributes:
        reference: its outputs, in the dtype of the inputs.
        truth: its outputs in float64, or None.
        reason: why there is no truth.
    """

    reference: tuple[Tensor, ...]
    truth: tuple[Tensor, ...] | None
    reason: str = ""

    def tolerance(self, factors: Iterable[float]) -> str:
        """What is allowed where the error of the reference counts by one of these factors, for people."""
        if self.truth is None:
            return AS_TESTING.format(reason=self.reason)
        return IN_FLOAT64.format(factors=" or ".join(f"{factor:g}" for factor in sorted(set(factors))))


def expect(reference: Callable[..., Any], arguments: Arguments, leaves: Sequence[Any]) -> Expectation:
    """Run the reference on these leaves and, where that can be, in float64.

    Raises:
        ValueError: it writes into its inputs, so nothing can be compared with it, or returns what cannot be compared.
    """
    found = _observe(reference, arguments, leaves)
    if found.written:
        raise ValueError(f"the reference wrote into {', '.join(found.written)}; give one that leaves its inputs alone")
    try:
        truth = _observe(_doubled(reference), arguments, in_float64(leaves)).outputs
    except Exception as error:
        reason = f"the reference does not run in float64 ({type(error).__name__}: {_first_line(error)})"
        return Expectation(found.outputs, None, reason)
    reason = _why_no_truth(found.outputs, truth)
    return Expectation(found.outputs, None if reason else truth, reason)


def check(
    function: Callable[..., Any],
    arguments: Arguments,
    leaves: Sequence[Any],
    expected: Expectation,
    factor: float,
    *,
    in_place: bool = False,
) -> list[Judgement]:
    """Run a function and judge what it returns; one that raises is wrong.

    Args:
        function: what is judged.
        arguments: how it is called.
        leaves: what it is called with.
        expected: what the reference returned for the same leaves.
        factor: how many times the reference's own error is allowed.
        in_place: give it these very tensors, not copies: what remembers results by address is found out only so.
    """
    try:
        if in_place:
            with torch.no_grad():
                candidate = Run(_outputs(arguments.flat(function)(*leaves)), {})
        else:
            candidate = _observe(function, arguments, leaves)
    except Exception as error:
        return [_failed("call", f"raised {type(error).__name__}: {_first_line(error)}")]
    written = [_failed(name, "was written into") for name in candidate.written]
    if len(candidate.outputs) != len(expected.reference):
        message = f"are {len(candidate.outputs)}, the reference has {len(expected.reference)}"
        return [*written, _failed("outputs", message)]
    names = ["output"] if len(expected.reference) == 1 else [f"output {i}" for i in range(len(expected.reference))]
    truths = expected.truth or expected.reference
    return written + [
        _judge(name, ours, theirs, exact, None if expected.truth is None else factor)
        for name, ours, theirs, exact in zip(names, candidate.outputs, expected.reference, truths, strict=True)
    ]


def problem(judgements: Sequence[Judgement]) -> str:
    """What is wrong, empty if nothing is."""
    return "; ".join(f"{j.quantity} {j.message}" for j in judgements if not j.passed)


def _observe(function: Callable[..., Any], arguments: Arguments, leaves: Sequence[Any]) -> Run:
    """The outputs for copies of the leaves, and which of these were written into."""
    flat = arguments.flat(function)
    return run(lambda *own: _outputs(flat(*own)), arguments.names, leaves)


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


def _doubled(reference: Callable[..., Any]) -> Callable[..., Any]:
    """A module with its own tensors in float64; anything else as it is."""
    if isinstance(reference, torch.nn.Module):
        return copy.deepcopy(reference).double()
    return reference


def _why_no_truth(reference: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> str:
    """Why what came back from float64 inputs is no truth, empty if it is one."""
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


def _judge(name: str, ours: Tensor, theirs: Tensor, exact: Tensor, factor: float | None) -> Judgement:
    """One output: exactly where it holds integers, by the budget for a factor, by torch.testing for None."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        given, wanted = f"{tuple(ours.shape)} {ours.dtype}", f"{tuple(theirs.shape)} {theirs.dtype}"
        return _failed(name, f"is {given}, the reference's is {wanted}")
    if not (ours.is_floating_point() or ours.is_complex()):
        wrong = int((ours != theirs).sum())
        return _failed(name, f"differs in {wrong} of {ours.numel()} elements") if wrong else Judgement(name, True)
    if factor is None:
        return _close(name, ours, theirs)
    tensors = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (ours, theirs, exact)]
    runs = [Run((tensor,), {}) for tensor in tensors]
    (judgement,) = judge(runs[0], runs[1], runs[2], factor)
    return dataclasses.replace(judgement, quantity=name)


def _close(name: str, ours: Tensor, theirs: Tensor) -> Judgement:
    wide = torch.complex128 if ours.is_complex() else torch.float64
    errors, norm = (ours.to(wide) - theirs.to(wide)).norm(), theirs.to(wide).norm()
    relative = (errors / norm.clamp_min(torch.finfo(torch.float64).tiny)).item()
    try:
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    except AssertionError as error:
        message = "is off: " + " ".join(str(error).split())
        return Judgement(name, False, relative_error=relative, error_over_budget=float("inf"), message=message)
    return Judgement(name, True, relative_error=relative)


def _failed(name: str, message: str) -> Judgement:
    return Judgement(name, False, error_over_budget=float("inf"), message=message)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
