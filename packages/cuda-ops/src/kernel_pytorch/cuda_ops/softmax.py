"""Softmax of scaled and masked scores, `softmax`, and its gradients.

    z = scale * x + mask                                     or -inf where a boolean mask is False
    y = exp(z - max(z)) / sum(exp(z - max(z)))               over the last dimension

The operation between the two products of attention (Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1,
https://arxiv.org/abs/1706.03762). With a mask, a row in which every z is -inf gives zeros, and so does its gradient.
Everything is computed in float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._core.call_kinds import needs_grad
from ._core.operator import declare
from ._fused_ln_act.softmax import SOFTMAX_BACKWARD_RULES, SOFTMAX_RULES
from .operators import call

HALVES = (torch.float16, torch.bfloat16)

run_softmax_backward = declare(**SOFTMAX_BACKWARD_RULES)
run_softmax = declare(**SOFTMAX_RULES, backward=run_softmax_backward)


def softmax(x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Normalise the exponentials of the last dimension of `scale * x + mask`, differentiable any number of times.

    Args:
        x: `(..., N)`, float16, bfloat16 or float32, on a CPU float64 too; any strides.
        scale: of x, before the mask.
        mask: broadcasts to the shape of x, on its device; any of these dtypes, added, or bool, False for what is
            masked out; or None.

    Returns:
        `(..., N)` in the dtype of x, promoted with that of a mask that is added. Saved for the backward is the result;
        on a CPU, of 16 bits, in float32.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
        ValueError: a number is not finite.
    """
    widens = isinstance(x, Tensor) and x.device.type == "cpu" and x.dtype in HALVES and needs_grad(x, mask)
    if not widens:
        return call("softmax", run_softmax, x, mask, scale)
    # y has the same bits, and what is saved of it is not rounded, as by the operators of PyTorch that this stands for.
    # A gradient made of what was rounded has half as large an error again, and one many times as large where a row of
    # dy has much in common.
    adds = isinstance(mask, Tensor) and mask.dtype != torch.bool
    return call("softmax", run_softmax, x.float(), mask, scale).to(
        torch.promote_types(x.dtype, mask.dtype) if adds else x.dtype  # type: ignore[union-attr]
    )
