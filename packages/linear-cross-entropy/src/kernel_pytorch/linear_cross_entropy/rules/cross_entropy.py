"""`cross_entropy` of logits and its gradient.

The operators return the loss of each token, and for the backward `normalizer`, `(..., 2)`: its largest logit, and the
logarithm of the sum of exponentials relative to that. (Their sum is the logarithm of the sum of exponentials, which has
fewer digits the larger the logits are.) What is made of losses is left to PyTorch's operators. Saved for the backward,
beside the inputs: two numbers a token.

Tokens are independent: DTensor may shard logits and targets over every dimension of tokens, and nothing is sent.
Losses, and what is kept for the backward, are sharded like the tokens. Logits sharded over the vocabulary are gathered
first, by DTensor: the sum of exponentials would have to be sent between ranks, which these operators do not do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.gradients import asks
from .._core.operator import Rules, per_element
from .._core.sharding import by_rows

SCALARS = "SymInt ignore_index, float label_smoothing, float z_loss, float softcap"
LOSSES = "(Tensor loss, Tensor normalizer)"
# FLOPs of a logit: exponential, sums and comparison forward; exponential, difference and products backward.
FORWARD, BACKWARD = 4, 5


def counted(target: Tensor, words: int, ignore_index: int) -> Tensor:
    """Which tokens count: not those to be ignored, nor those whose target is no word."""
    target = target.to(torch.int64)  # which holds any ignore_index: in 32 bits one that is too large wraps around
    return (target != ignore_index) & (target >= 0) & (target < words)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def fake(rows: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """What is allocated for each of the rows, of logits or of hidden states."""
    wide, tokens = wide_dtype(rows.dtype), rows.shape[:-1]
    return rows.new_empty(tokens, dtype=wide), rows.new_empty((*tokens, 2), dtype=wide)


@asks("backward dloss normalizer logits target ignore_index label_smoothing z_loss softcap")
def gradient(backward: Callable[..., Any], *given: Any) -> tuple[Tensor, None]:
    """Gradient of the logits."""
    return backward(*given), None


SHARDING = by_rows("logits target loss normalizer dloss y")


CROSS_ENTROPY_RULES: Rules = {
    "schema": f"cross_entropy(Tensor logits, Tensor target, {SCALARS}) -> {LOSSES}",
    "fake": fake,
    "gradient": gradient,
    "flops": per_element(FORWARD),
    "sharding": SHARDING,
}


# The gradient.


def fake_backward(dloss: Tensor, normalizer: Tensor, logits: Tensor, *arguments: Any) -> Tensor:
    """What it allocates: contiguous whatever the strides of the logits."""
    return logits.new_empty(logits.shape)


def formula(dloss: Tensor, normalizer: Tensor, logits: Tensor, target: Tensor, *scalars: Any) -> Tensor:
    """The same in PyTorch that autograd can follow."""
    return gradient_of_logits(logits.to(wide_dtype(logits.dtype)), dloss, target, *scalars).to(logits.dtype)


def gradient_of_logits(
    logits: Tensor,
    dloss: Tensor,
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


FLOPS_BACKWARD = per_element(BACKWARD, 2)
CROSS_ENTROPY_BACKWARD_RULES: Rules = {
    "schema": f"cross_entropy_backward(Tensor dloss, Tensor normalizer, Tensor logits, Tensor target, {SCALARS})"
    " -> Tensor",
    "fake": fake_backward,
    "formula": formula,
    "flops": FLOPS_BACKWARD,
    "sharding": SHARDING,
}
