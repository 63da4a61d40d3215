"""The public functions: arguments by keyword, checked before any kernel starts."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ._core.arguments import (
    check_choice,
    check_eps,
    check_like,
    check_number,
    check_parameter,
    check_tensor,
    shape_of,
)
from ._core.operation import Operation
from .levels import LADDER

Casting = Literal["llama", "gemma", "none"]
CASTINGS: tuple[Casting, ...] = ("llama", "gemma", "none")


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: Casting = "llama",
    level: str | None = None,
) -> Tensor:
    """Root mean square layer normalisation over the last dimension.

    `y = x / sqrt(mean(x^2) + eps) * (offset + weight)`, differentiable in x and weight, any number of times except at
    level "compile" (once).

    Args:
        x: `(..., N)`, float16, bfloat16, float32 or float64, any strides, N at least 1.
        weight: `(N,)`, any of these dtypes, on the device of x; None for no scale.
        eps: added to the mean square; not negative.
        offset: added to the weight: 1.0 for models that store weights around zero (Gemma).
        casting: where to round. "llama": the norm in float32, rounded to x.dtype before the weight is applied.
            "gemma" (and `torch.nn.RMSNorm`): everything in float32, rounded once to x.dtype. "none": every product in
            x.dtype, only the mean in float32. Levels "native" and "compile" may leave out a rounding in between and
            are the more accurate for it; "reference" and "triton" round exactly there.
        level: None for the default of this device, or "reference", "native", "torchscript", "compile", "triton",
            "cuda".

    Returns:
        `(..., N)`; dtype x.dtype for "gemma", else x and weight promoted.

    Raises:
        TypeError: x or weight is no floating-point tensor of an allowed dtype.
        ValueError: shapes, devices, eps, casting or level do not fit; the message names the argument.
        RuntimeError: the level asked for cannot run on this device or dtype; the message says why.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.
    """
    return RMS_NORM(x, weight, eps, offset, casting, level)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: Casting = "llama",
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the residual stream and normalise the sum: `h = x + residual`, `y = rms_norm(h)`.

    What pre-norm transformers do between two blocks, in one pass over memory. Differentiable in x, residual and weight.

    `weight`, `eps`, `offset` and `level` are as in `rms_norm`; `TypeError` and `RuntimeError` are raised as by
    `rms_norm`.

    Args:
        x: `(..., N)`, the output of the previous block; float16, bfloat16, float32 or float64.
        residual: `(..., N)`, the residual stream, on the device of x; its dtype may differ.
        casting: as in `rms_norm`, with h in the place of x.

    Returns:
        `(y, new_residual)`, both `(..., N)`; new_residual is h, in the promoted dtype of x and residual.

    Raises:
        ValueError: as in `rms_norm`; also where residual has another shape or device than x.

    Source: as `rms_norm`; the residual add in front of it as in Touvron et al., "LLaMA", 2023,
    https://arxiv.org/abs/2302.13971.
    """
    return ADD_RMS_NORM(x, residual, weight, eps, offset, casting, level)


def head_rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: Casting = "llama",
    level: str | None = None,
) -> Tensor:
    """Normalise every attention head on its own, each with its own row of weights: QK-norm.

    Models that share one weight among the heads (Qwen3) pass `weight.expand(num_heads, head_dim)`.

    `eps`, `offset`, `casting` and `level` are as in `rms_norm`; `TypeError` and `RuntimeError` are raised as by
    `rms_norm`.

    Args:
        x: `(..., H, D)`, queries or keys; float16, bfloat16, float32 or float64, any strides.
        weight: `(H, D)`, on the device of x.

    Returns:
        `(..., H, D)`, dtype as in `rms_norm`.

    Raises:
        ValueError: as in `rms_norm`; also where x has fewer than two dimensions.

    Source: Henry et al., "Query-Key Normalization for Transformers", 2020, https://arxiv.org/abs/2010.04245, with the
    root mean square in the place of the L2 norm as in Qwen3, https://arxiv.org/abs/2505.09388.
    """
    return HEAD_RMS_NORM(x, weight, eps, offset, casting, level)


def _check(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> None:
    check_tensor("x", x)
    _check_scalars(eps, offset, casting)
    check_parameter("weight", weight, x)


def _check_add(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> None:
    check_tensor("x", x)
    check_like("residual", residual, x)
    _check_scalars(eps, offset, casting)
    check_parameter("weight", weight, x)


def _check_heads(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> None:
    check_tensor("x", x)
    _check_scalars(eps, offset, casting)
    if x.dim() < 2:
        raise ValueError(f"x: shape is {shape_of(x)}; it must be (..., H, D)")
    check_tensor("weight", weight)
    check_parameter("weight", weight, x, dimensions=2)


def _check_scalars(eps: float, offset: float, casting: str) -> None:
    check_eps(eps)
    check_number("offset", offset)
    check_choice("casting", casting, CASTINGS)


RMS_NORM = Operation(LADDER, "rms_norm", _check)
ADD_RMS_NORM = Operation(LADDER, "add_rms_norm", _check_add)
HEAD_RMS_NORM = Operation(LADDER, "head_rms_norm", _check_heads)
