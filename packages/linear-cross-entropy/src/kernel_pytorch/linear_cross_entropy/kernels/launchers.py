"""What the operators call: the checks of direct calls, then the kernels of Triton or the chunks of PyTorch.

A direct call of an operator passes no other check: a wrong shape would read out of bounds. Only level "triton" imports
Triton, when it launches a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.linear_cross_entropy._core.direct_calls import check_count, check_memory, check_operands
from kernel_pytorch.linear_cross_entropy._core.plans import Planned
from kernel_pytorch.linear_cross_entropy._core.sizes import allocator
from kernel_pytorch.linear_cross_entropy.arguments import TARGETS, check_words


def _check(rows: Tensor, target: Tensor) -> None:
    check_operands(rows=rows)
    if target.dtype not in TARGETS:
        raise TypeError(f"target: dtype is {target.dtype}; allowed are torch.int64, torch.int32")
    if target.shape != rows.shape[:-1]:
        raise ValueError(f"target: shape is {tuple(target.shape)}; it must be {tuple(rows.shape[:-1])}")
    check_memory("target", target)


def _check_parameters(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        shape = tuple(weight.shape)
        raise ValueError(f"weight: shape is {shape}; it must have two dimensions, the last {hidden.shape[-1]}")
    if weight.dtype != hidden.dtype:
        raise TypeError(f"weight: dtype is {weight.dtype}; it must be that of hidden, {hidden.dtype}")
    check_operands(weight=weight, bias=bias)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: shape is {tuple(bias.shape)}; it must be {tuple(weight.shape[:1])}")


def _check_of_tokens(dloss: Tensor, normalizer: Tensor, target: Tensor) -> None:
    check_operands(dloss=dloss, normalizer=normalizer)
    check_count(target.numel(), dloss=dloss)
    check_count(2 * target.numel(), normalizer=normalizer)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Products inside an operator are what they are, whatever its caller has switched on."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _rounding(rows: Tensor) -> Any:
    """What plans rest on beside their arguments: whether torch's switch lets tensor cores round float32."""
    return rows.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision


def _of_tokens(found: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape the numbers of each row as the target; results are no views, which could not be changed in place."""
    loss, normalizer = found
    view = torch.ops.aten._unsafe_view
    return view(loss, target.shape), view(normalizer, (*target.shape, 2))


@functools.cache
def linear_cross_entropy(level: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The launcher of `(loss, normalizer)` of each token."""
    return Planned(functools.partial(_plan_linear, level), state=lambda hidden, *others: _rounding(hidden))


def _plan_linear(
    level: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *scalars: Any,
) -> Callable[..., tuple[Tensor, Tensor]]:
    _check(hidden, target)
    _check_parameters(hidden, weight, bias)
    if level == "triton" and target.numel() > 0:
        from . import forward

        return forward.plan(hidden, weight, target, bias, *scalars[:4])
    from . import chunked

    def run(
        hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *scalars: Any
    ) -> tuple[Tensor, Tensor]:
        rows = hidden.reshape(-1, hidden.shape[-1])
        with _without_autocast(hidden):
            found = chunked.forward_linear(rows, weight, target.reshape(-1), bias, *scalars)
        return _of_tokens(found, target)

    return run


@functools.cache
def linear_cross_entropy_backward(level: str) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The launcher of the gradients of hidden, weight and bias; `(0,)` where not needed."""
    plan = functools.partial(_plan_linear_backward, level)
    return Planned(plan, state=lambda dloss, normalizer, hidden, *others: _rounding(hidden))


def _plan_linear_backward(
    level: str,
    dloss: Tensor,
    normalizer: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *scalars_and_needs: Any,
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    _check(hidden, target)
    _check_parameters(hidden, weight, bias)
    _check_of_tokens(dloss, normalizer, target)
    *scalars, need_dhidden, need_dweight, need_dbias = scalars_and_needs
    options = *scalars, need_dhidden, need_dweight, need_dbias and bias is not None
    if level == "triton":
        from . import backward

        compute = backward.plan(dloss, normalizer, hidden, weight, target, bias, *options)
    else:
        from . import chunked

        def compute(
            dloss: Tensor, normalizer: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None
        ) -> tuple[Tensor, Tensor, Tensor]:
            rows = hidden.reshape(-1, hidden.shape[-1])
            of_rows = dloss.reshape(-1), normalizer.reshape(-1, 2), rows, weight, target.reshape(-1), bias
            dhidden, dweight, dbias = chunked.backward_linear(*of_rows, *options)
            return dhidden.view(hidden.shape) if need_dhidden else dhidden, dweight, dbias

    def run(dloss: Tensor, normalizer: Tensor, hidden: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
        with _without_autocast(hidden):
            return compute(dloss, normalizer, hidden, *others[:3])

    return run


@functools.cache
def linear_cross_entropy_with_gradients(level: str) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The launcher of the loss and the gradients of hidden, weight and bias; `(0,)` where not needed."""
    plan = functools.partial(_plan_linear_with_gradients, level)
    return Planned(plan, state=lambda hidden, *others: _rounding(hidden))


def _plan_linear_with_gradients(
    level: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    divisor: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    need_dhidden: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    _check(hidden, target)
    _check_parameters(hidden, weight, bias)
    if divisor is not None:
        check_count(1, divisor=divisor)
        check_memory("divisor", divisor)
    if softcap > 0.0 and label_smoothing > 0.0:
        raise ValueError(f"label_smoothing: given {label_smoothing}; with softcap {softcap} it must be 0 here")
    scalars = ignore_index, label_smoothing, z_loss, softcap
    needs = need_dhidden, need_dweight, need_dbias and bias is not None
    if level == "triton" and target.numel() > 0:
        from . import three_products

        compute = three_products.plan(hidden, weight, target, bias, divisor, *scalars, *needs)
    else:
        from . import chunked

        def compute(
            hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, divisor: Tensor | None
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            rows = hidden.reshape(-1, hidden.shape[-1])
            return chunked.gradients_linear(rows, weight, target.reshape(-1), bias, divisor, *scalars, *needs)

    def run(hidden: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with _without_autocast(hidden):
            loss, dhidden, *parameters = compute(hidden, *others[:4])
        return loss, torch.ops.aten._unsafe_view(dhidden, hidden.shape) if need_dhidden else dhidden, *parameters

    return run


@functools.cache
def scale_gradient(level: str) -> Callable[..., Tensor]:
    """The launcher of a gradient, contiguous, times a number `()`, rounded once to the dtype of a third tensor.

    With a last argument True the result is written over the gradient, which must have that dtype.
    """
    return Planned(functools.partial(_plan_scale, level))


def _plan_scale(
    level: str, gradient: Tensor, factor: Tensor, like: Tensor, in_place: bool = False
) -> Callable[..., Tensor]:
    check_operands(gradient=gradient, factor=factor)
    check_count(1, factor=factor)
    if level == "triton" and gradient.numel() > 0:
        from . import three_products

        return three_products.plan_scale(gradient, factor, like, in_place)
    dtype = like.dtype
    # A tensor without dimensions is a number on a CPU; on a GPU it would be rounded to the dtype of the gradient.
    shape = () if gradient.device.type == "cpu" and gradient.dtype == dtype else (1,)

    def run(gradient: Tensor, factor: Tensor, *others: Any) -> Tensor:
        result = gradient if in_place else torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
        return torch.mul(gradient, factor.view(shape), out=result)

    return run


@functools.cache
def cross_entropy(level: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The launcher of `(loss, normalizer)` of each token."""
    return Planned(functools.partial(_plan_logits, level))


def _plan_logits(
    level: str,
    logits: Tensor,
    target: Tensor,
    *scalars: Any,
) -> Callable[..., tuple[Tensor, Tensor]]:
    _check(logits, target)
    if level == "triton" and target.numel() > 0:
        from . import logits as of_logits

        return of_logits.plan(logits, target, *scalars)
    from . import chunked

    def run(logits: Tensor, target: Tensor, *scalars: Any) -> tuple[Tensor, Tensor]:
        rows = logits.reshape(-1, logits.shape[-1])
        with _without_autocast(logits):
            found = chunked.forward_logits(rows, target.reshape(-1), *scalars)
        return _of_tokens(found, target)

    return run


@functools.cache
def cross_entropy_backward(level: str) -> Callable[..., Tensor]:
    """The launcher of the gradient of logits, contiguous; see `_plan_logits_backward` for its argument `inplace`."""
    return Planned(functools.partial(_plan_logits_backward, level))


def _plan_logits_backward(
    level: str,
    dloss: Tensor,
    normalizer: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    inplace: bool = False,
) -> Callable[..., Tensor]:
    """With `inplace`, which the operator does not have, the gradient is written over the logits."""
    _check(logits, target)
    _check_of_tokens(dloss, normalizer, target)
    scalars, new = (ignore_index, label_smoothing, z_loss, softcap), allocator(logits)
    if logits.numel() == 0:
        return lambda dloss, normalizer, logits, *others: logits if inplace else new()
    if level == "triton":
        from . import logits as of_logits

        compute = of_logits.plan_backward(dloss, normalizer, logits, target, *scalars, inplace)
    else:
        from . import chunked

        def compute(dloss: Tensor, normalizer: Tensor, logits: Tensor, target: Tensor, *others: Any) -> Tensor:
            rows = logits.reshape(-1, logits.shape[-1])
            result = logits if inplace else new()
            in_rows = rows if inplace else result.view(rows.shape)
            of_rows = dloss.reshape(-1), rows, target.reshape(-1), normalizer.reshape(-1, 2)
            with _without_autocast(logits):
                chunked.backward_logits(*of_rows, *scalars, in_rows)
            if inplace and in_rows.data_ptr() != logits.data_ptr():  # no view of these logits has rows
                logits.copy_(in_rows.view(logits.shape))
            return result

    if not inplace:
        return compute

    def run(dloss: Tensor, normalizer: Tensor, logits: Tensor, *others: Any) -> Tensor:
        result = compute(dloss, normalizer, logits, *others)
        torch.autograd.graph.increment_version(logits)
        return result

    return run


def check_target(target: Tensor, words: int, ignore_index: int) -> Tensor:
    """A copy of the target, or IndexError: an operator, so that a compiled graph checks what it is given."""
    check_memory("target", target)
    check_words(target, words, ignore_index)
    return target.clone(memory_format=torch.contiguous_format)
