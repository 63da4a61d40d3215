"""The truth and the error that is allowed.

The truth is the reference run in float64, forward and gradients. A candidate may err, element by element, by

    budget_factor * max |reference - truth|  +  one unit in the last place of the truth

where the reference runs in the candidate's own dtype and the maximum is taken over the tensor: as good as careful
PyTorch in the same precision, up to a factor of two. NaN or infinity where the truth is representable fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """What one call produced.

    Attributes:
        outputs: tensors, in order.
        gradients: per differentiable argument, None where autograd returned none.
        written: names of the tensors that the call wrote into although they were not its own.
    """

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]
    written: tuple[str, ...] = ()

    def without_gradients(self) -> Run:
        """The forward alone."""
        return Run(self.outputs, {}, self.written)

    def quantities(self) -> dict[str, Tensor | None]:
        """Everything that is compared, by the name that messages use."""
        if len(self.outputs) == 1:
            named: dict[str, Tensor | None] = {"output": self.outputs[0]}
        else:
            named = {f"output {i}": output for i, output in enumerate(self.outputs)}
        return named | {f"gradient of {name}": gradient for name, gradient in self.gradients.items()}


@dataclass(frozen=True)
class Judgement:
    """The verdict on one quantity.

    Attributes:
        quantity: "output", "gradient of weight", ...
        passed: within the budget everywhere.
        relative_error: ||candidate - truth|| / ||truth|| over the finite elements.
        reference_error: the same for the reference.
        error_over_budget: the worst element's error divided by what it is allowed; infinity for NaN.
        message: what is wrong, empty if nothing is.
    """

    quantity: str
    passed: bool
    relative_error: float = 0.0
    reference_error: float = 0.0
    error_over_budget: float = 0.0
    message: str = ""


def run(
    function: Callable[..., Any],
    names: Sequence[str],
    arguments: Sequence[Any],
    output_gradients: Sequence[Tensor] | None = None,
) -> Run:
    """Call a function on copies of the arguments, and its backward where `output_gradients` are given.

    Args:
        function: takes `arguments` by position, returns a tensor or a tuple of tensors.
        names: of the arguments.
        arguments: tensors and plain values; floating-point tensors receive gradients.
        output_gradients: one per output, or None for the forward alone.
    """
    own = [_copy(a) for a in arguments]
    backward = output_gradients is not None
    differentiable = {
        name: a.requires_grad_()
        for name, a in zip(names, own, strict=True)
        if backward and isinstance(a, Tensor) and a.is_floating_point()
    }
    with torch.set_grad_enabled(backward):
        result = function(*own)
    outputs = (result,) if isinstance(result, Tensor) else tuple(result)
    gradients: dict[str, Tensor | None] = {}
    written = []
    if output_gradients is not None:
        incoming = [_copy(g) for g in output_gradients]
        found = torch.autograd.grad(outputs, list(differentiable.values()), incoming, allow_unused=True)
        gradients = dict(zip(differentiable, found, strict=True))
        written += [f"gradient of output {i}" for i, g in enumerate(incoming) if not _same(g, output_gradients[i])]
    written += [n for n, a, b in zip(names, own, arguments, strict=True) if isinstance(a, Tensor) and not _same(a, b)]
    return Run(tuple(o.detach() for o in outputs), gradients, tuple(written))


def in_float64(arguments: Sequence[Any]) -> list[Any]:
    """The same arguments with every floating-point tensor in float64."""
    return [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments]


def random_like(outputs: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Standard normal incoming gradients for these outputs."""
    return [torch.randn(o.shape, generator=generator, device=generator.device).to(o.dtype) for o in outputs]


def judge(candidate: Run, reference: Run, truth: Run, budget_factor: float = 2.0) -> list[Judgement]:
    """Hold a candidate against the truth, with the budget that the reference's own error gives."""
    judgements = [
        Judgement(name, False, error_over_budget=float("inf"), message=f"{name} was written into")
        for name in candidate.written
    ]
    if len(candidate.outputs) != len(reference.outputs):
        message = f"{len(candidate.outputs)} outputs, the reference has {len(reference.outputs)}"
        return [*judgements, Judgement("outputs", False, error_over_budget=float("inf"), message=message)]
    ours, theirs, exact = candidate.quantities(), reference.quantities(), truth.quantities()
    return judgements + [_judge(name, ours[name], theirs[name], exact[name], budget_factor) for name in theirs]


def unit_in_the_last_place(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of `dtype` around each float64 element of `truth`."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(truth.abs())
    spacing = torch.ldexp(torch.full_like(truth, info.eps), exponent - 1)
    return spacing.clamp_min(info.tiny * info.eps)


def _judge(
    name: str, candidate: Tensor | None, reference: Tensor | None, truth: Tensor | None, budget_factor: float
) -> Judgement:
    def failed(message: str) -> Judgement:
        return Judgement(name, False, error_over_budget=float("inf"), message=message)

    if reference is None or truth is None:
        return Judgement(name, True) if candidate is None else failed("is not None, the reference's is")
    if candidate is None:
        return failed("is missing (None)")
    if candidate.shape != reference.shape or candidate.dtype != reference.dtype:
        given, wanted = f"{tuple(candidate.shape)} {candidate.dtype}", f"{tuple(reference.shape)} {reference.dtype}"
        return failed(f"is {given}, the reference's is {wanted}")
    if candidate.numel() == 0:
        return Judgement(name, True)

    representable = truth.abs() <= torch.finfo(candidate.dtype).max
    ours, theirs, exact = (t[representable].double() for t in (candidate, reference, truth))
    wrong_infinities = candidate[~representable & truth.isfinite()].isnan().sum().item()
    not_finite = int((~ours.isfinite()).sum().item() + wrong_infinities)
    if not_finite:
        return failed(f"has {not_finite} NaN or infinite elements where the truth is finite")
    if exact.numel() == 0:
        return Judgement(name, True)

    reference_errors = (theirs - exact).abs()
    reference_errors = reference_errors[reference_errors.isfinite()]
    largest = reference_errors.max().item() if reference_errors.numel() else 0.0
    budget = budget_factor * largest + unit_in_the_last_place(exact, candidate.dtype)
    errors = (ours - exact).abs()
    ratio, position = (errors / budget).max(0)
    norm = exact.norm().clamp_min(torch.finfo(torch.float64).tiny)
    relative, reference_relative = ((errors.norm() / norm).item(), (reference_errors.norm() / norm).item())
    message = ""
    if ratio > 1.0:
        message = (
            f"is off by {errors[position].item():.3g} where {budget[position].item():.3g} is allowed "
            f"(got {ours[position].item():.6g}, truth {exact[position].item():.6g}; "
            f"{int((errors > budget).sum())} of {errors.numel()} elements)"
        )
    return Judgement(name, not message, relative, reference_relative, ratio.item(), message)


def _copy(argument: Any) -> Any:
    """A detached copy with the same strides, gaps included."""
    if not isinstance(argument, Tensor):
        return argument
    copy = torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=argument.device)
    return copy.copy_(argument.detach())


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a.detach().isnan(), b.isnan()) and torch.equal(a.detach().nan_to_num(), b.nan_to_num()))
