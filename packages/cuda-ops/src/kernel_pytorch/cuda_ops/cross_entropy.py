"""Cross entropy of logits, with label smoothing, z-loss and soft cap, in one walk over them.

    lse = log(sum(exp(z))),  z = logits, or softcap * tanh(logits / softcap)
    loss = lse - (1 - s) * z[target] - s * mean(z) + z_loss * lse^2

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867; the sources
of smoothing, z-loss and cap stand in csrc/cross_entropy/cross_entropy.h. Everything is computed in float32 (float64 for
float64). Beside the logits two numbers a token are saved: the largest, and the logarithm of the sum of exponentials
relative to it. Their sum, lse, has fewer digits the larger the logits are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import check_tensor
from .differentiable import differentiable, wants_graph
from .operators import below_autograd, call, count_writes, operators, per_element, register
from .sharding import Shardings, row_placements


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _fake(logits: Tensor, target: Tensor, *scalars: Any) -> tuple[Tensor, Tensor]:
    wide = _compute_dtype(logits.dtype)
    return logits.new_empty(target.shape, dtype=wide), logits.new_empty((*target.shape, 2), dtype=wide)


def _fake_backward(dloss: Tensor, normalizer: Tensor, logits: Tensor, target: Tensor, *scalars: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def _fake_backward_(dloss: Tensor, normalizer: Tensor, logits: Tensor, target: Tensor, *scalars: Any) -> None:
    return None


def _counted(target: Tensor, words: int, ignore_index: int) -> Tensor:
    return (target != ignore_index) & (target >= 0) & (target < words)


def backward_formula(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    """The gradient of logits in PyTorch that autograd can follow."""
    counts = _counted(target, logits.shape[-1], ignore_index)
    z = logits.to(_compute_dtype(logits.dtype)).masked_fill(~counts[..., None], 0.0)  # NaN would stay NaN, times zero
    z = softcap * torch.tanh(z / softcap) if softcap > 0.0 else z
    words = z.shape[-1]
    gradient = torch.softmax(z, -1)
    if z_loss > 0.0:
        gradient = gradient * (1.0 + 2.0 * z_loss * torch.logsumexp(z, -1, keepdim=True))
    at_target = torch.arange(words, device=z.device) == target[..., None]
    gradient = gradient - (1.0 - label_smoothing) * at_target - label_smoothing / words
    gradient = gradient * torch.where(counts, dloss, 0.0)[..., None]
    gradient = gradient * (1.0 - (z / softcap).square()) if softcap > 0.0 else gradient
    return gradient.to(logits.dtype)


def _differentiable_backward(
    dloss: Tensor, normalizer: Tensor, logits: Tensor, target: Tensor, *scalars: Any
) -> Tensor:
    """The backward operator with gradients of its own: the formula where a graph is wanted, else the kernel."""
    if wants_graph(dloss, logits):
        return backward_formula(dloss, logits, target, *scalars)
    return below_autograd(operators.cross_entropy_backward.default, dloss, normalizer, logits, target, *scalars)


def _no_gradient(*arguments: Any) -> None:
    """In place there is nothing left to differentiate with."""
    if wants_graph(arguments[0], arguments[2]):
        raise RuntimeError("cross_entropy_backward_ has no gradient: it overwrites what it is computed of")
    below_autograd(operators.cross_entropy_backward_.default, *arguments)


def _can_be_overwritten(dloss: Tensor, logits: Tensor) -> bool:
    """Whether the gradient may take the place of the logits: nobody traces, shares or differentiates them again."""
    return (
        logits.is_contiguous()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and type(logits) in (Tensor, torch.nn.Parameter)
        and not wants_graph(dloss, logits)
    )


class CrossEntropyFunction(torch.autograd.Function):
    """`(logits, target, scalars, inplace) -> (loss, normalizer)`; normalizer carries no gradient."""

    @staticmethod
    def forward(logits: Tensor, target: Tensor, *scalars: Any) -> tuple[Tensor, Tensor]:
        """Run the operator; it writes nothing, whatever the last argument says."""
        return below_autograd(operators.cross_entropy.default, logits, target, *scalars[:4])

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
        none = (None,) * (len(ctx.needs_input_grad) - 1)
        if dloss is None:
            return (None, *none)
        normalizer, logits, target = ctx.saved_tensors
        scalars = ctx.scalars[:4]
        if ctx.inplace and _can_be_overwritten(dloss, logits):
            over = logits.detach()
            below_autograd(operators.cross_entropy_backward_.default, dloss, normalizer, over, target, *scalars)
            return (over, *none)
        return (_differentiable_backward(dloss, normalizer, logits, target, *scalars), *none)


_run = differentiable(CrossEntropyFunction)


def _out_of_place(logits: Tensor, target: Tensor, *scalars: Any) -> tuple[Tensor, Tensor]:
    return _run(logits, target, *scalars[:4], False)


def _in_place(logits: Tensor, target: Tensor, *scalars: Any) -> tuple[Tensor, Tensor]:
    return _run(logits, target, *scalars[:4], True)


# Sharding: rows may lie anywhere, words are whole.


def _sharding(placements: Any, logits: Any, target: Any, *scalars: Any) -> Shardings:
    for rows, _ in row_placements(placements, logits.ndim):
        yield [rows, rows], [rows, rows]


def _sharding_backward(
    placements: Any, dloss: Any, normalizer: Any, logits: Any, target: Any, *scalars: Any
) -> Shardings:
    for rows, _ in row_placements(placements, logits.ndim):
        yield [rows], [rows] * 4


def _flops_backward(dloss: Any, normalizer: Any, logits: Any, *arguments: Any, **keywords: Any) -> int:
    return 6 * torch.Size(logits).numel()


register("cross_entropy", _fake, _out_of_place, per_element(5), _sharding)
register("cross_entropy_backward", _fake_backward, _differentiable_backward, _flops_backward, _sharding_backward)
register("cross_entropy_backward_", _fake_backward_, _no_gradient, _flops_backward)
count_writes("cross_entropy_backward_")


def _expanded(target: Tensor, logits: Tensor) -> Tensor:
    check_tensor("cross_entropy", "logits", logits)
    check_tensor("cross_entropy", "target", target)
    wanted, shape = logits.shape[:-1], target.shape
    if len(shape) > len(wanted) or any(a not in (1, b) for a, b in zip(shape[::-1], wanted[::-1], strict=False)):
        raise ValueError(
            f"cross_entropy: target: shape is {tuple(shape)}; for logits of shape {tuple(logits.shape)} it must"
            f" expand to {tuple(wanted)}: words are the last dimension"
        )
    return target.expand(wanted)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    inplace: bool = False,
) -> Tensor:
    """The loss of each token, or what `reduction` makes of them; differentiable in logits any number of times.

    Args:
        logits: `(..., V)`, float16, bfloat16 or float32, on a CPU float64 too; any strides.
        target: `(...)`, or what expands to it; int64 or int32, on the device of logits.
        ignore_index: the target of tokens that do not count: their loss and gradient are zero. Every target that is no
            word, below 0 or not below V, is taken for this one, without an error (PyTorch's own raises one on a CPU).
        label_smoothing: from 0 to 1.
        z_loss: factor of the squared `lse`.
        softcap: bound of the logits; 0 for none.
        reduction: "mean" over the tokens that count, "sum" or "none".
        inplace: let the backward write the gradient of the logits over them, where that is possible: whatever else
            looks at their memory, a detached copy or a parameter itself, has the gradient for its values then.

    Returns:
        `()`, or `(...)` for "none"; float32, or float64 for float64. Zero where no token counts.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        ValueError: another reduction, a target that does not expand to `(...)`, or a number that is not finite.
        TypeError: an argument is not of its kind.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"cross_entropy: reduction: given {reduction!r}; allowed are 'mean', 'sum', 'none'")
    if type(inplace) is not bool:
        raise TypeError(f"cross_entropy: inplace: given {type(inplace).__name__}; it must be a bool")
    target = _expanded(target, logits)
    scalars = ignore_index, label_smoothing, z_loss, softcap
    gradient = _in_place if inplace else _out_of_place
    loss = call("cross_entropy", operators.cross_entropy.default, gradient, logits, target, *scalars)[0]
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / _counted(target, logits.shape[-1], ignore_index).sum().clamp(min=1)
