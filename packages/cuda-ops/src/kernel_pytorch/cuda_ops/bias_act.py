"""Bias and activation, `bias_act`, and its gradients.

    y = activation(x + bias)

Fused so first by Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053. Everything is computed in
float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

from torch import Tensor

from ._core.operator import declare
from ._fused_ln_act.bias import BIAS_ACT_BACKWARD_RULES, BIAS_ACT_RULES
from .operators import call

run_bias_act_backward = declare(**BIAS_ACT_BACKWARD_RULES)
run_bias_act = declare(**BIAS_ACT_RULES, backward=run_bias_act_backward)


def bias_act(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Add the bias, then activate, differentiable in x and bias any number of times.

    Args:
        x: `(..., N)`, float16, bfloat16 or float32, on a CPU float64 too; any strides.
        bias: `(N,)`, any of these dtypes, on the device of x; None for the activation alone.
        activation: "gelu", "gelu_tanh", "silu", "relu", "relu_squared", "quick_gelu", "tanh", "sigmoid" or "identity".

    Returns:
        `(..., N)` in the dtype of x.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
    """
    return call("bias_act", run_bias_act, x, bias, activation)
