"""Softmax of scaled and masked scores, defined.

    z = scale * x + mask                                     or -inf where a boolean mask is False
    y = exp(z - max(z)) / sum(exp(z - max(z)))               over the last dimension

The operation between the two products of attention (Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1,
https://arxiv.org/abs/1706.03762). Subtracting the maximum does not change the result; it prevents overflow of `exp`.

With a mask, a row in which every z is -inf gives zeros, and so does its gradient: a query that may look at nothing gets
nothing. PyTorch's softmax gives NaN there. Without a mask nothing is masked, and a row of -inf is NaN as in PyTorch.

Run in float64 this file is the oracle that every other level is held against. In a lower precision everything is
computed in float32 and rounded once, to the dtype of x, promoted with that of a mask that is added. Plain PyTorch, no
decorators: TorchScript and TorchInductor compile these very functions.
"""

from typing import Optional

import torch
from torch import Tensor


def score_dtype(x: Tensor, mask: Optional[Tensor]) -> torch.dtype:
    """The dtype of the scores and of the result: of x, promoted with that of a mask that is added."""
    if mask is None or mask.dtype == torch.bool:
        return x.dtype
    return torch.promote_types(x.dtype, mask.dtype)


def masked(z: Tensor, mask: Tensor) -> Tensor:
    """Scores with the mask: `z + mask`, or -inf where a boolean mask is False.

    Args:
        z: `(..., N)`, float32 or float64.
        mask: broadcasts to the shape of z; any float dtype or bool.
    """
    if mask.dtype == torch.bool:
        return z.masked_fill(~mask, float("-inf"))
    return z + mask.to(z.dtype)


def softmax(x: Tensor, scale: float, mask: Optional[Tensor]) -> Tensor:
    """Normalise the exponentials of the last dimension of `scale * x + mask`.

    Args:
        x: `(..., N)`, any float dtype.
        scale: of x, before the mask.
        mask: broadcasts to the shape of x; any float dtype, added, or bool, False for what is masked out; or None.

    Returns:
        `(..., N)` in the dtype of x, promoted with that of a mask that is added.
    """
    dtype = score_dtype(x, mask)
    z = x.to(torch.promote_types(dtype, torch.float32)) * scale
    if mask is None:
        return torch.softmax(z, -1).to(dtype)
    z = masked(z, mask)
    nothing_left = z.amax(-1, keepdim=True) == float("-inf")
    return torch.softmax(z.masked_fill(nothing_left, 0.0), -1).masked_fill(nothing_left, 0.0).to(dtype)
