"""The truth and the error that is allowed.

The truth is the reference run in float64, forward and gradients. A candidate may err, element by element, by

    budget_factor * max |reference - truth|  +  one unit in the last place of the truth

where the reference runs in the candidate's own dtype and the maximum is taken over the tensor: as good as careful
PyTorch in the same precision, up to a factor of two. For an output that is a mean, the maximum is taken over the terms
of the mean: the error of a single element is noise. NaN fails, and so does infinity where the truth is representable;
a truth beyond the largest number of the dtype counts as that number, and infinity of its sign is as good.

Where the truth is NaN or infinite, and the reference in the candidate's own dtype is the same, the candidate must be
it there too: NaN must propagate. Where the two differ, one of them overflowed, and a NaN of the truth requires nothing.
In a gradient, infinity is as good as NaN: in another order of its products, infinities need not meet.

A gradient that is a sum over n rows may be added in any order, so `error_of_sum` is allowed too where that is more.
Added one by one, partial sum k of terms with standard deviation s has the size s * sqrt(k) and is rounded by at most
eps/2 of it, evenly distributed: the standard deviation of the result is eps/2 / sqrt(3) * s * n / sqrt(2), and
s * sqrt(n) is the rms of the gradients, because the incoming gradients are random. That is eps * sqrt(n) * rms / 5; the
largest of a million elements is five times as far off, which twice half of eps * sqrt(n) * rms covers. Accumulation is
expected in float32 at least, so eps is never that of a 16-bit dtype; a dropped term is 1 / (eps * n) times the budget.

The error of a single element is noise: a miss that another seed does not repeat is none (`confirm`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.tensors import as_tuple, is_float


@dataclass(frozen=True)
class Run:
    """The results of one call.

    Attributes:
        outputs: tensors, in order.
        gradients: per differentiable argument, None where autograd returned none.
        written: names of the inputs that the call wrote to.
        terms: the terms of each output that is a mean; else empty.
    """

    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]
    written: tuple[str, ...] = ()
    terms: tuple[Tensor, ...] = ()

    def without_gradients(self) -> Run:
        """The forward alone."""
        return dataclasses.replace(self, gradients={})

    def quantities(self) -> dict[str, Tensor | None]:
        """Return everything that is compared, by the name in messages."""
        several = len(self.outputs) > 1
        named: dict[str, Tensor | None] = {
            f"output {i}" if several else "output": o for i, o in enumerate(self.outputs)
        }
        return named | {f"gradient of {name}": gradient for name, gradient in self.gradients.items()}


@dataclass(frozen=True)
class ErrorCheck:
    """The verdict on one quantity.

    Attributes:
        quantity: "output", "gradient of weight", ...
        passed: within the budget everywhere.
        relative_error: ||candidate - truth|| / ||truth|| over the finite elements.
        reference_error: the same for the reference.
        error_over_budget: the worst element's error divided by what it is allowed; infinity for NaN.
        message: the error; empty if there is none.
    """

    quantity: str
    passed: bool
    relative_error: float = 0.0
    reference_error: float = 0.0
    error_over_budget: float = 0.0
    message: str = ""


def failed(quantity: str, message: str) -> ErrorCheck:
    """Return the verdict on a quantity that is wrong whatever the budget."""
    return ErrorCheck(quantity, False, error_over_budget=float("inf"), message=message)


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
        output_gradients: one per output, or None, or none, for the forward alone.
    """
    own = [_copy(a) for a in arguments]
    backward = bool(output_gradients)
    differentiable = {name: a.requires_grad_() for name, a in zip(names, own, strict=True) if backward and is_float(a)}
    with torch.set_grad_enabled(backward):
        result = function(*own)
    outputs = as_tuple(result)
    gradients: dict[str, Tensor | None] = {}
    written = []
    if output_gradients:
        incoming = [_copy(g) for g in output_gradients]
        found = torch.autograd.grad(outputs, list(differentiable.values()), incoming, allow_unused=True)
        gradients = dict(zip(differentiable, found, strict=True))
        written += [f"gradient of output {i}" for i, g in enumerate(incoming) if not _same(g, output_gradients[i])]
    written += [n for n, a, b in zip(names, own, arguments, strict=True) if isinstance(a, Tensor) and not _same(a, b)]
    return Run(tuple(o.detach() for o in outputs), gradients, tuple(written))


def run_definition(
    function: Callable[..., Any],
    in_parts: Callable[..., Any] | None,
    names: Sequence[str],
    arguments: Sequence[Any],
    output_gradients: Sequence[Tensor] | None = None,
) -> Run:
    """`run` a definition, or where it does not fit on the GPU, what computes the same in parts of named arguments."""
    try:
        return run(function, names, arguments, output_gradients)
    except torch.OutOfMemoryError:  # its tensors live as long as the error does
        if in_parts is None:
            raise
    return run(lambda *values: in_parts(**dict(zip(names, values, strict=True))), names, arguments, output_gradients)


def in_float64(arguments: Sequence[Any]) -> list[Any]:
    """The same arguments with every floating-point tensor in float64."""
    return [a.double() if is_float(a) else a for a in arguments]


def random_like(outputs: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Standard normal incoming gradients for these outputs."""
    return [torch.randn(o.shape, generator=generator, device=generator.device).to(o.dtype) for o in outputs]


def judge(
    candidate: Run, reference: Run, truth: Run, budget_factor: float = 2.0, summands: Mapping[str, int] | None = None
) -> list[ErrorCheck]:
    """Check a candidate against the truth, with the budget that the reference's own error gives.

    Args:
        candidate: the results to judge.
        reference: the definition in the candidate's dtype.
        truth: the definition in float64.
        budget_factor: how many times the reference's own error is allowed.
        summands: by argument, how many terms its gradient is the sum of, where it is one.
    """
    error_checks = [failed(name, "was written into") for name in candidate.written]
    if len(candidate.outputs) != len(reference.outputs):
        message = f"are {len(candidate.outputs)}, the reference has {len(reference.outputs)}"
        return [*error_checks, failed("outputs", message)]
    ours, theirs, exact = candidate.quantities(), reference.quantities(), truth.quantities()
    of_terms = dict(zip(theirs, map(_largest_error, reference.terms, truth.terms), strict=False))  # outputs come first
    for name, count in (summands or {}).items():
        gradient, exact_gradient = reference.gradients.get(name), truth.gradients.get(name)
        if gradient is not None and exact_gradient is not None:
            of_terms[f"gradient of {name}"] = error_of_sum(exact_gradient, gradient.dtype, count)
    return error_checks + [
        _judge(name, ours[name], theirs[name], exact[name], budget_factor, of_terms.get(name, 0.0)) for name in theirs
    ]


def confirm(error_checks: Sequence[ErrorCheck], again: Callable[[], Sequence[ErrorCheck]]) -> list[ErrorCheck]:
    """Replace each miss by the result of fresh inputs if they do not repeat it; NaN or a wrong shape always counts.

    Args:
        error_checks: on the first inputs.
        again: judges the same on inputs of another seed; called only where something missed its budget.
    """
    if not any(map(_is_miss, error_checks)):
        return list(error_checks)
    fresh = {j.quantity: j for j in again()}
    return [fresh[j.quantity] if _is_miss(j) and fresh.get(j.quantity, j).passed else j for j in error_checks]


def _is_miss(error_check: ErrorCheck) -> bool:
    return not error_check.passed and math.isfinite(error_check.error_over_budget)


def summands_by_shape(outputs: Sequence[Tensor], arguments: Mapping[str, Any]) -> dict[str, int]:
    """How many rows the gradient of each argument is summed over, where it is broadcast to an output."""
    found: dict[str, int] = {}
    for name, argument in arguments.items():
        for output in outputs:
            if isinstance(argument, Tensor) and 0 < argument.numel() < output.numel():
                sizes = zip(reversed(argument.shape), reversed(output.shape), strict=False)
                if argument.dim() <= output.dim() and all(mine in (1, whole) for mine, whole in sizes):
                    found[name] = max(found.get(name, 1), output.numel() // argument.numel())
    return found


def error_of_sum(truth: Tensor, dtype: torch.dtype, summands: int) -> float:
    """Bound the error of careful summation in any order: half of eps * sqrt(n) * rms; see the top of this file."""
    if summands < 2 or not truth.numel():
        return 0.0
    eps = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    finite = truth[truth.isfinite()]
    return 0.5 * eps * (summands / max(1, finite.numel())) ** 0.5 * finite.norm().item()


def unit_in_the_last_place(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of `dtype` around each float64 element of `truth`."""
    info = torch.finfo(dtype)
    # Without its mantissa a float64 is the power of two below it: exact, which torch.ldexp is not beyond float32.
    power_of_two = (truth.abs().view(torch.int64) & ~(2**52 - 1)).view(torch.float64)
    return (power_of_two * info.eps).clamp_min(info.tiny * info.eps)


def _largest_error(reference: Tensor, truth: Tensor) -> float:
    """Return the largest error of elements where both are finite; 0.0 if there are none."""
    errors = (reference.double() - truth).abs()
    errors = errors[errors.isfinite()]
    return errors.max().item() if errors.numel() else 0.0


def _judge(
    name: str,
    candidate: Tensor | None,
    reference: Tensor | None,
    truth: Tensor | None,
    budget_factor: float,
    error_of_terms: float,
) -> ErrorCheck:
    if reference is None or truth is None:
        return ErrorCheck(name, True) if candidate is None else failed(name, "is not None, the reference's is")
    if candidate is None:
        return failed(name, "is missing (None)")
    if candidate.shape != reference.shape or candidate.dtype != reference.dtype:
        given, wanted = f"{tuple(candidate.shape)} {candidate.dtype}", f"{tuple(reference.shape)} {reference.dtype}"
        return failed(name, f"is {given}, the reference's is {wanted}")
    if candidate.numel() == 0:
        return ErrorCheck(name, True)
    if candidate.is_complex():
        candidate, reference, truth = (torch.view_as_real(t.resolve_conj()) for t in (candidate, reference, truth))
    elif not candidate.is_floating_point():
        wrong = int((candidate != reference).sum())
        return failed(name, f"differs in {wrong} of {candidate.numel()} elements") if wrong else ErrorCheck(name, True)

    found = _numbers(candidate, reference, truth, name.startswith("gradient"))
    if isinstance(found, str):
        return failed(name, found)
    ours, exact, reference_errors = found
    if exact.numel() == 0:
        return ErrorCheck(name, True)
    largest = max(error_of_terms, reference_errors.max().item() if reference_errors.numel() else 0.0)
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
    return ErrorCheck(name, not message, relative, reference_relative, ratio.item(), message)


def _numbers(
    candidate: Tensor, reference: Tensor, truth: Tensor, of_gradient: bool
) -> tuple[Tensor, Tensor, Tensor] | str:
    """Return candidate, truth and the reference's errors in float64, where the truth is a number; or what is wrong."""
    largest = torch.finfo(candidate.dtype).max
    # Nearly always all are finite; masks would then take two thirds of the time.
    if all(math.isfinite(end) for tensor in (candidate, reference, truth) for end in tensor.aminmax()):
        ours, theirs, exact = (t.double().flatten() for t in (candidate, reference, truth))
        exact = exact.clamp(-largest, largest)
        return ours, exact, (theirs - exact).abs()

    if message := _numbers_instead(candidate, reference, truth, of_gradient):
        return message
    defined = ~truth.isnan()
    ours, theirs, exact = (t[defined].double() for t in (candidate, reference, truth))
    representable = exact.abs() <= largest
    astray, reference_astray = (t.isnan() | (t.isinf() & representable) for t in (ours, theirs))
    if astray.any():
        return f"has {int(astray.sum())} NaN or infinite elements where the truth is finite"
    ours, theirs, exact = (t.clamp(-largest, largest) for t in (ours, theirs, exact))
    return ours, exact, (theirs - exact)[~reference_astray].abs()


def _numbers_instead(candidate: Tensor, reference: Tensor, truth: Tensor, or_infinite: bool) -> str:
    """Describe what is wrong where truth and reference agree on NaN or on an infinity; "" if nothing is."""
    passed_on = ~candidate.isfinite() if or_infinite else candidate.isnan()
    lost = truth.isnan() & reference.isnan() & ~passed_on
    if lost.any():
        return f"has {int(lost.sum())} numbers where the truth is NaN (the first is {candidate[lost][0].item():.6g})"
    lost = truth.isinf() & (reference == truth) & (candidate != truth)
    if lost.any():
        first = f"got {candidate[lost][0].item():.6g}, truth {truth[lost][0].item():.6g}"
        return f"is not infinite in {int(lost.sum())} elements where the truth is ({first})"
    return ""


def _copy(argument: Any) -> Any:
    """A detached copy of a tensor and of all memory beneath it: same strides, same contents of the gaps."""
    if not isinstance(argument, Tensor):
        return argument
    memory = argument.untyped_storage().clone()
    copy = torch.empty(0, dtype=argument.dtype, device=argument.device)
    return copy.set_(memory, argument.storage_offset(), argument.shape, argument.stride())


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether the memory beneath two tensors is the same, byte for byte, gaps included."""
    return torch.equal(_memory(a), _memory(b))


def _memory(tensor: Tensor) -> Tensor:
    memory = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory, 0, (memory.nbytes(),))
