"""Root mean square layer normalisation, defined.

    y = x / sqrt(mean(x^2) + eps) * (offset + weight)        the mean runs over the last dimension

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.

Run in float64 this file is the oracle that every other level is held against; run in a lower precision it rounds where
the published models round, which is what `casting` names:

- "llama": the norm in float32, rounded to `x.dtype`, then multiplied by the weight. Result: `x` and weight promoted.
- "gemma": everything in float32, rounded once. Result: `x.dtype`. This is also what `torch.nn.RMSNorm` does.
- "none": only the mean in float32; every product rounded to `x.dtype`. Result: `x` and weight promoted.

Float64 input is computed in float64 throughout. Plain PyTorch, no decorators: TorchScript and TorchInductor compile
these very functions.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Optional[Tensor], eps: float, offset: float, casting: str) -> Tensor:
    """Normalise the last dimension of `x`.

    Args:
        x: `(..., N)`, any float dtype.
        weight: `(N,)`, or `(H, N)` for `x` of shape `(..., H, N)`; None for no scale.
        eps: added to the mean square.
        offset: added to the weight (1 for weights stored around zero, as Gemma's).
        casting: "llama", "gemma" or "none", see above.

    Returns:
        `(..., N)` in the dtype that `casting` says.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if casting == "none":
        normalized = x * rstd.to(x.dtype)
    elif casting == "llama":
        normalized = (h * rstd).to(x.dtype)
    else:
        normalized = h * rstd
    if weight is not None:
        # float(offset) + weight keeps the weight's dtype: a Python number never promotes a tensor.
        if casting == "gemma":
            normalized = normalized * (offset + weight.to(wide))
        else:
            normalized = normalized * (offset + weight)
    if casting == "gemma":
        return normalized.to(x.dtype)
    return normalized


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Optional[Tensor], eps: float, offset: float, casting: str
) -> Tuple[Tensor, Tensor]:
    """Add the residual stream, then normalise: `h = x + residual`, `y = rms_norm(h)`.

    Args:
        x: `(..., N)`, the output of the previous block.
        residual: `(..., N)`, the residual stream.
        casting: as for `rms_norm`, with `h` in the place of `x`.

    Returns:
        `y`, and `h` in the promoted dtype of `x` and `residual`: the residual stream of the next block.
    """
    h = x + residual
    return rms_norm(h, weight, eps, offset, casting), h


def head_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> Tensor:
    """Normalise every head on its own, each with its own row of weights (QK-norm).

    Args:
        x: `(..., H, D)`.
        weight: `(H, D)`.

    Returns:
        `(..., H, D)`.
    """
    return rms_norm(x, weight, eps, offset, casting)
