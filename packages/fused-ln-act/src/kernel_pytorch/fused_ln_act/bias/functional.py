"""The public functions behind a linear layer: arguments checked before any kernel starts."""

from __future__ import annotations

from torch import Tensor

from kernel_pytorch.fused_ln_act._core.arguments import check_like, check_parameter, check_tensor
from kernel_pytorch.fused_ln_act._core.operation import Operation
from kernel_pytorch.fused_ln_act.arguments import SeededOperation, check_activation, check_dropout
from kernel_pytorch.fused_ln_act.levels import LADDER


def bias_act(x: Tensor, bias: Tensor | None, activation: str, *, level: str | None = None) -> Tensor:
    """Add a bias and activate: `y = activation(x + bias)`, in float32, rounded once.

    Differentiable in x and bias, any number of times except at level "compile" (once).

    Args:
        x: `(..., N)`, float16, bfloat16, float32 or float64, any strides, N at least 1.
        bias: `(N,)`, any of these dtypes, on the device of x; None for the activation alone.
        activation: "gelu", "gelu_tanh", "silu", "relu", "relu_squared", "quick_gelu", "tanh", "sigmoid" or "identity".
        level: None for the default of this device, or "reference", "native", "torchscript", "compile", "triton",
            "cuda".

    Returns:
        `(..., N)` in the dtype of x.

    Raises:
        TypeError: x or bias is no floating-point tensor of an allowed dtype.
        ValueError: shapes, devices, activation or level do not fit; the message names the argument.
        RuntimeError: the level asked for cannot run on this device or dtype; the message says why.

    Saved for the backward at levels "triton" and "cuda": x (nothing for "identity") and bias.

    Source: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053; the activations are named in
    `activations.py`.
    """
    return BIAS_ACT(x, bias, activation, level)


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float = 0.0,
    seed: Tensor | None = None,
    *,
    level: str | None = None,
) -> Tensor:
    """Add a bias, drop, and add to the residual stream: `y = residual + dropout(x + bias)`, in float32, rounded once.

    Differentiable in x, bias and residual.

    `x` and `level` are as in `bias_act`; `RuntimeError` is raised as by `bias_act`.

    Args:
        bias: as in `bias_act`; None for no bias.
        residual: `(..., N)`, the residual stream, on the device of x; its dtype may differ.
        p: probability, from 0 to below 1, that an element of `x + bias` is dropped; those that are kept are divided by
            `1 - p`. Dropout happens whenever this is above 0: give 0 in evaluation.
        seed: int64 of shape `()` on the device of x; the same seed gives the same mask, at every level, forward and
            backward. None with `p` above 0 draws one from torch's generator of that device (level "native" draws
            PyTorch's own mask instead).

    Returns:
        `(..., N)` in the promoted dtype of x and residual.

    Raises:
        TypeError: as in `bias_act`; also where the seed is no int64 tensor.
        ValueError: as in `bias_act`; also where residual has another shape or device than x, or p is no probability
            below 1.

    Saved for the backward at levels "triton" and "cuda": bias and seed.

    Source: as `bias_act`.
    """
    return BIAS_DROPOUT_ADD(x, bias, residual, p, seed, level)


def _check_act(x: Tensor, bias: Tensor | None, activation: str) -> None:
    check_tensor("x", x)
    check_parameter("bias", bias, x)
    check_activation(activation)


def _check_add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor | None) -> None:
    check_tensor("x", x)
    check_parameter("bias", bias, x)
    check_like("residual", residual, x)
    check_dropout(p, seed, x, "p")


BIAS_ACT = Operation(LADDER, "bias_act", _check_act)
BIAS_DROPOUT_ADD = SeededOperation(LADDER, "bias_dropout_add", _check_add)
