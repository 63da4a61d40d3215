"""Bias, dropout and residual, `bias_dropout_add`, and its gradients.

    y = residual + dropout(x + bias)

Fused so first by Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053. Everything is computed in
float32 (float64 for float64) and rounded once; the mask is that of `_fused_ln_act/philox.py`.
"""

from __future__ import annotations

from torch import Tensor

from ._core.operator import declare
from ._fused_ln_act.bias import BIAS_DROPOUT_ADD_BACKWARD_RULES, BIAS_DROPOUT_ADD_RULES
from .operators import call

run_bias_dropout_add_backward = declare(**BIAS_DROPOUT_ADD_BACKWARD_RULES)
run_bias_dropout_add = declare(**BIAS_DROPOUT_ADD_RULES, backward=run_bias_dropout_add_backward)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float = 0.0, seed: Tensor | None = None
) -> Tensor:
    """Add the bias, drop, add to the residual stream; differentiable in x, bias and residual any number of times.

    Args:
        x: `(..., N)`, float16, bfloat16 or float32, on a CPU float64 too; any strides.
        bias: `(N,)`, any of these dtypes, on the device of x; None for no bias.
        residual: `(..., N)`, on the device of x; its dtype may differ.
        p: the probability that an element of `x + bias` is dropped, from 0 to below 1.
        seed: int64 `()`, on the device of x; None where p is 0.

    Returns:
        `(..., N)` in the promoted dtype of x and residual.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
        ValueError: a number is not finite.
    """
    return call("bias_dropout_add", run_bias_dropout_add, x, bias, residual, seed, p)
