"""Checks for the tests of a technique.

Each check raises AssertionError saying what is wrong and where; second derivatives and export raise torch's own errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.oracle import in_float64
from kernel_pytorch.harness.technique import Case, Implementation, Level, Operation, Technique
from kernel_pytorch.harness.tensors import as_tuple, is_float, leaves, wanting
from kernel_pytorch.harness.trials import RANDOM, Trial, make_arguments
from kernel_pytorch.harness.verification import forget_other_shapes, verify_trial

# Tolerance of second derivatives in float64: far below an error, far above the effect of another order of summation.
ROUNDING = 1e-9


class Skipped(Exception):
    """The implementation cannot run here; the message says why."""


def check_trial(
    technique: Technique, operation: Operation, implementation: Implementation, trial: Trial, device: torch.device
) -> None:
    """Check that the forward and every gradient are within the budget and that no input is written to.

    Raises:
        Skipped: it cannot run here.
        AssertionError: it is wrong.
    """
    if implementation.level is Level.COMPILE:
        forget_other_shapes(operation, trial.case)
    verification = verify_trial(technique, operation, implementation, trial, device)
    if verification.unavailable is not None:
        raise Skipped(verification.unavailable)
    assert verification.passed, "\n".join(verification.failures())


def check_gradient_combinations(function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Check that every subset of the differentiable arguments gets its gradients, equal to those of the full set.

    Args:
        function: takes `arguments` by position.
        arguments: tensors and plain values.
    """
    positions = [i for i, a in enumerate(arguments) if is_float(a)]

    def gradients(subset: Sequence[int]) -> dict[int, Tensor | None]:
        own = leaves(arguments, [i in subset for i in range(len(arguments))], copy=True)
        outputs = as_tuple(function(*own))
        generator = torch.Generator(outputs[0].device).manual_seed(0)
        incoming = [torch.randn(o.shape, generator=generator, device=o.device, dtype=torch.float64) for o in outputs]
        loss = sum((o.double() * g).sum() for o, g in zip(outputs, incoming, strict=True))
        assert isinstance(loss, Tensor)
        assert loss.requires_grad, f"no output has a gradient, wanted for arguments {list(subset)}"
        loss.backward()
        return {i: own[i].grad for i in positions}

    full = gradients(positions)
    for mask in range(1, 2 ** len(positions)):
        subset = [p for bit, p in enumerate(positions) if mask >> bit & 1]
        for i, gradient in gradients(subset).items():
            where = f"argument {i} with gradients wanted for {subset}"
            if i not in subset:
                assert gradient is None, f"{where}: has a gradient that was not requested"
                continue
            assert gradient is not None, f"{where}: gradient is missing"
            # Not bitwise: a compiler makes another graph for every subset.
            torch.testing.assert_close(gradient, full[i], msg=lambda m, w=where: f"{w}: {m}")


def check_second_derivatives(function: Callable[..., Any], arguments: Sequence[Any], *, fast: bool = False) -> None:
    """Run `gradcheck` and `gradgradcheck` in float64 on small inputs; with `fast`, along random directions, on any.

    A second backward may round differently (TorchScript compiles after two runs); `check_deterministic` checks bits.
    """
    own = leaves(in_float64(arguments))
    assert torch.autograd.gradcheck(function, own, fast_mode=fast, nondet_tol=ROUNDING)
    assert torch.autograd.gradgradcheck(function, own, fast_mode=fast, nondet_tol=ROUNDING)


def check_compiled_equals_eager(
    function: Callable[..., Any], arguments: Sequence[Any], *, dynamic: bool, backward: bool = True
) -> None:
    """Check that `torch.compile(fullgraph=True)` of a call gives bitwise the results, and gradients, of eager."""
    torch._dynamo.reset()
    eager, compiled = (
        _forward_and_backward(f, arguments, backward)
        for f in (function, torch.compile(lambda *a: function(*a), fullgraph=True, dynamic=dynamic))
    )
    _assert_same(compiled, eager)


def check_export(function: Callable[..., Any], arguments: Sequence[Any]) -> torch.export.ExportedProgram:
    """Check that `torch.export` with every first dimension dynamic gives the results of eager at another size."""

    class Exported(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            rest = iter(tensors)
            return function(*(next(rest) if isinstance(a, Tensor) else a for a in arguments))

    tensors = tuple(a for a in arguments if isinstance(a, Tensor))
    rows = tensors[0].shape[0]
    batch = torch.export.Dim("batch", min=2)
    shapes = {"tensors": tuple({0: batch} if t.dim() > 1 and t.shape[0] == rows else None for t in tensors)}
    program = torch.export.export(Exported(), tensors, dynamic_shapes=shapes)
    larger = tuple(torch.cat([t, t]) if s is not None else t for t, s in zip(tensors, shapes["tensors"], strict=True))
    _assert_same(as_tuple(program.module()(*larger)), as_tuple(Exported()(*larger)))
    return program


def check_deterministic(
    function: Callable[..., Any], arguments: Sequence[Any], *, repeats: int = 3, backward: bool = True
) -> None:
    """Check that repeated calls give bitwise the same outputs and, with `backward`, gradients."""
    first = _forward_and_backward(function, arguments, backward)
    for _ in range(repeats):
        _assert_same(_forward_and_backward(function, arguments, backward), first)


def check_rows_independent(
    function: Callable[..., Any], arguments: Sequence[Any], rows: str = "leading", data: Sequence[bool] = ()
) -> None:
    """Check that results of a row do not depend on the number of rows: the first rows alone give bitwise the same.

    So must the gradients of arguments with rows. A vector has rows only where `data` says so.
    """
    count = arguments[0].shape[0]
    is_data = data or [False] * len(arguments)
    with_rows = [
        isinstance(a, Tensor) and (a.dim() > 1 or (a.dim() == 1 and known)) and a.shape[0] == count
        for a, known in zip(arguments, is_data, strict=True)
    ]

    def results(keep: int) -> list[Tensor]:
        part = [
            a.detach()[:keep].requires_grad_(a.requires_grad) if has else a
            for a, has in zip(arguments, with_rows, strict=True)
        ]
        outputs = as_tuple(function(*part))
        wanted = [a for a, has in zip(part, with_rows, strict=True) if has and a.requires_grad]
        if not wanted:
            return list(outputs)
        incoming = _incoming(outputs, count)
        return [*outputs, *torch.autograd.grad(outputs, wanted, incoming)]

    whole = results(count)
    for keep in sorted({1, count // 2, count - 1}):
        _assert_same(results(keep), [result[:keep] for result in whole], f", {keep} of {count} {rows} rows")


def case_arguments(operation: Operation, case: Case, device: torch.device) -> list[Any]:
    """Return the arguments of a case with random input."""
    return make_arguments(operation, Trial(case, RANDOM), device)


def _assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor], where: str = "") -> None:
    """Raise AssertionError, naming the result, unless all results are bitwise the same."""
    for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=lambda m, p=position: f"result {p}{where}: {m}")


def _forward_and_backward(function: Callable[..., Any], arguments: Sequence[Any], backward: bool) -> list[Tensor]:
    own = leaves(arguments, backward, copy=True)
    outputs = as_tuple(function(*own))
    if not backward:
        return list(outputs)
    incoming = _incoming(outputs)
    return [o.detach() for o in outputs] + list(torch.autograd.grad(outputs, wanting(own), incoming))


def _incoming(outputs: Sequence[Tensor], rows: int | None = None) -> list[Tensor]:
    """Make incoming gradients that depend on shapes alone; with `rows`, the first rows of gradients with that many."""
    generator = torch.Generator(outputs[0].device).manual_seed(0)
    shapes = [o.shape if rows is None else (rows, *o.shape[1:]) for o in outputs]
    incoming = [torch.randn(s, generator=generator, device=outputs[0].device) for s in shapes]
    return [g[: o.shape[0]].to(o.dtype) for g, o in zip(incoming, outputs, strict=True)]
