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

from torch import Tensor

from ._core.call_kinds import can_bypass_dispatcher, needs_grad
from ._core.gradients import asks
from ._core.operator import declare, with_gradient
from ._linear_cross_entropy.cross_entropy import (
    CROSS_ENTROPY_BACKWARD_RULES,
    CROSS_ENTROPY_RULES,
    FLOPS_BACKWARD,
    SCALARS,
    counted,
)
from .arguments import check_tensor
from .operators import call, count_writes


def _refuse(*arguments: Any) -> None:
    raise RuntimeError("cross_entropy_backward_ has no gradient: it overwrites what it is computed of")


run_cross_entropy_backward = declare(**CROSS_ENTROPY_BACKWARD_RULES)
run_cross_entropy_backward_ = declare(
    f"cross_entropy_backward_(Tensor dloss, Tensor normalizer, Tensor(a!) logits, Tensor target, {SCALARS}) -> ()",
    fake=lambda *arguments: None,
    formula=_refuse,
    flops=FLOPS_BACKWARD,
)
run_cross_entropy = declare(**CROSS_ENTROPY_RULES, backward=run_cross_entropy_backward)


@asks("dloss normalizer logits target ignore_index label_smoothing z_loss softcap")
def _gradient_in_place(*given: Any) -> tuple[Tensor, None]:
    """Write the gradient over the logits, or into a new tensor if they are traced, shared or differentiated again."""
    dloss, normalizer, logits, *others = given
    if not logits.is_contiguous() or not can_bypass_dispatcher(logits) or needs_grad(dloss, logits):
        return run_cross_entropy_backward(*given), None
    over = logits.detach()
    run_cross_entropy_backward_(dloss, normalizer, over, *others)
    return over, None


run_cross_entropy_in_place = with_gradient(run_cross_entropy, _gradient_in_place)
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
    run = run_cross_entropy_in_place if inplace else run_cross_entropy
    loss = call("cross_entropy", run, logits, target, *scalars)[0]
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / counted(target, logits.shape[-1], ignore_index).sum().clamp(min=1)
