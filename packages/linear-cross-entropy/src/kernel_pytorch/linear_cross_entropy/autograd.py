"""Gradients of levels "native" and "triton", and the functions of level "triton".

The operators are attached to autograd here: called directly, `torch.ops.kernel_pytorch.*` differentiate like these
functions do. Where gradients are to be differentiated again (`create_graph=True`) they are computed by plain PyTorch
that autograd can follow, and that holds all logits.

Saved for the backward, beside the inputs: two numbers a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import flops
from .chunks import counted, wide_dtype
from .differentiable import differentiable, wants_graph
from .ops import (
    below_autograd,
    is_plain,
    launch_linear,
    launch_linear_backward,
    launch_logits,
    launch_logits_backward,
    library,
    overlaps_itself,
)

operators = torch.ops.kernel_pytorch


def logits_formula(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    """The gradient of logits `(..., V)`, wide, in differentiable PyTorch."""
    words = logits.shape[-1]
    counts = counted(target, words, ignore_index)
    logits = logits.masked_fill(~counts[..., None], 0.0)  # NaN would stay NaN, times zero
    z = softcap * torch.tanh(logits / softcap) if softcap > 0.0 else logits
    at_target = torch.arange(words, device=z.device) == target[..., None]
    gradient = torch.softmax(z, -1)
    if z_loss > 0.0:
        gradient = gradient * (1.0 + 2.0 * z_loss * torch.logsumexp(z, -1, keepdim=True))
    gradient = gradient - (1.0 - label_smoothing) * at_target - label_smoothing / words
    gradient = gradient * torch.where(counts, dloss, 0.0)[..., None]
    return gradient * (1.0 - (z / softcap).square()) if softcap > 0.0 else gradient


def linear_backward(
    dloss: Tensor,
    normalizer: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    chunk: int,
    level: str,
    need_dhidden: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward operator with gradients of its own: the formula where a graph is wanted, else chunk by chunk."""
    scalars = ignore_index, label_smoothing, z_loss, softcap
    if not wants_graph(dloss, hidden, weight, bias):
        tensors, needed = (dloss, normalizer, hidden, weight, target, bias), (need_dhidden, need_dweight, need_dbias)
        operator = operators.linear_cross_entropy_backward
        return below_autograd(operator, launch_linear_backward, tensors, *scalars, chunk, level, *needed)
    wide = wide_dtype(hidden.dtype)
    data, matrix = hidden.to(wide), weight.to(wide)
    logits = data @ matrix.t()
    logits = logits if bias is None else logits + bias.to(wide)
    gradient = logits_formula(dloss, logits, target, *scalars)
    rows = gradient.reshape(-1, gradient.shape[-1])
    like_bias = weight if bias is None else bias
    return (
        (gradient @ matrix).to(hidden.dtype) if need_dhidden else hidden.new_empty((0,)),
        (rows.t() @ data.reshape(-1, data.shape[-1])).to(weight.dtype) if need_dweight else weight.new_empty((0,)),
        rows.sum(0).to(like_bias.dtype) if need_dbias and bias is not None else like_bias.new_empty((0,)),
    )


def logits_backward(
    dloss: Tensor,
    normalizer: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    level: str,
) -> Tensor:
    """The same for logits."""
    scalars = ignore_index, label_smoothing, z_loss, softcap
    if not wants_graph(dloss, logits):
        tensors = dloss, normalizer, logits, target
        return below_autograd(operators.cross_entropy_backward, launch_logits_backward, tensors, *scalars, level)
    return logits_formula(dloss, logits.to(wide_dtype(logits.dtype)), target, *scalars).to(logits.dtype)


class LinearCrossEntropyFunction(torch.autograd.Function):
    """`(hidden, weight, target, bias, ...) -> (loss, normalizer)`; normalizer carries no gradient."""

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *scalars: Any) -> Any:
        """Run the operator."""
        tensors = hidden, weight, target, bias
        return below_autograd(operators.linear_cross_entropy, launch_linear, tensors, *scalars)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the inputs and two numbers a token."""
        hidden, weight, target, bias, *ctx.scalars = inputs
        _, normalizer = output
        ctx.save_for_backward(normalizer, hidden, weight, target, bias)
        ctx.mark_non_differentiable(normalizer)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        """Gradients of hidden, weight and bias, each only where it is needed."""
        none = (None,) * (4 + len(ctx.scalars))
        if dloss is None:
            return none
        need_dhidden, need_dweight, _, need_dbias = ctx.needs_input_grad[:4]
        arguments = [dloss, *ctx.saved_tensors, *ctx.scalars, need_dhidden, need_dweight, need_dbias]
        dhidden, dweight, dbias = linear_backward(*arguments)
        return (
            dhidden if need_dhidden else None,
            dweight if need_dweight else None,
            None,
            dbias if need_dbias else None,
            *none[4:],
        )


class CrossEntropyFunction(torch.autograd.Function):
    """`(logits, target, ..., inplace) -> (loss, normalizer)`; normalizer carries no gradient."""

    @staticmethod
    def forward(logits: Tensor, target: Tensor, *scalars: Any) -> Any:
        """Run the operator; it writes nothing, whatever the last argument says."""
        return below_autograd(operators.cross_entropy, launch_logits, (logits, target), *scalars[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the inputs and two numbers a token."""
        logits, target, *ctx.scalars, ctx.inplace = inputs
        _, normalizer = output
        ctx.save_for_backward(normalizer, logits, target)
        ctx.mark_non_differentiable(normalizer)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        """The gradient of logits, over the logits where that was asked for."""
        none = (None,) * (2 + len(ctx.scalars))
        if dloss is None:
            return (None, *none)
        tensors = [dloss, *ctx.saved_tensors]
        arguments: list[Any] = [*tensors, *ctx.scalars]
        if ctx.inplace and is_plain(*tensors) and not wants_graph(*tensors) and not overlaps_itself(tensors[2]):
            arguments.append(True)
            return (launch_logits_backward(*arguments).detach(), *none)
        return (logits_backward(*arguments), *none)


run_linear, run_logits = differentiable(LinearCrossEntropyFunction), differentiable(CrossEntropyFunction)


def _run_logits_out_of_place(logits: Tensor, target: Tensor, *scalars: Any) -> Any:
    return run_logits(logits, target, *scalars, False)


flops.register_when_counted()
library.impl("linear_cross_entropy", run_linear, "Autograd")
library.impl("linear_cross_entropy_backward", linear_backward, "Autograd")
library.impl("cross_entropy", _run_logits_out_of_place, "Autograd")
library.impl("cross_entropy_backward", logits_backward, "Autograd")


def reduce(loss: Tensor, target: Tensor, words: int, ignore_index: int, reduction: str) -> Tensor:
    """What "mean", "sum" or "none" makes of the losses of tokens, zero where they do not count."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / counted(target, words, ignore_index).sum().clamp(min=1)


def apply_linear(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk: int,
    level: str,
) -> Tensor:
    """`linear_cross_entropy` of `reference.py` by the operator. While torch.compile or export traces: one node."""
    run = operators.linear_cross_entropy if torch.compiler.is_compiling() else run_linear
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    target = target.expand(hidden.shape[:-1])
    scalars = ignore_index, label_smoothing, z_loss, softcap
    loss = run(hidden, weight, target, bias, *scalars, chunk, level)[0]
    return reduce(loss, target, weight.shape[0], ignore_index, reduction)


def apply_logits(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    inplace: bool,
    level: str,
) -> Tensor:
    """`cross_entropy` of `reference.py` by the operator."""
    target = target.expand(logits.shape[:-1])
    scalars = ignore_index, label_smoothing, z_loss, softcap, level
    if torch.compiler.is_compiling():  # which decides itself about memory
        loss = operators.cross_entropy(logits, target, *scalars)[0]
    else:
        loss = run_logits(logits, target, *scalars, inplace)[0]
    return reduce(loss, target, logits.shape[-1], ignore_index, reduction)


# The level: one positional signature, shared with reference.py.


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk: int,
) -> Tensor:
    """`linear_cross_entropy` of `reference.py`: one Triton kernel computes logits and reduces them."""
    scalars = ignore_index, label_smoothing, z_loss, softcap
    return apply_linear(hidden, weight, target, bias, *scalars, reduction, chunk, "triton")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    inplace: bool,
) -> Tensor:
    """`cross_entropy` of `reference.py`: one Triton kernel reads the logits once."""
    scalars = ignore_index, label_smoothing, z_loss, softcap
    return apply_logits(logits, target, *scalars, reduction, inplace, "triton")
