"""Cross entropy for language models, defined.

    z = logits, or softcap * tanh(logits / softcap)              V of them for each token
    lse = log(sum(exp(z))) = max(z) + log(sum(exp(z - max(z))))
    loss = lse - (1 - s) * z[target] - s * mean(z) + z_loss * lse^2

`s` is the label smoothing of Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2016,
https://arxiv.org/abs/1512.00567: the target gets 1 - s of the probability, and s is shared by all V words. The z-loss
keeps the normaliser near one, Chowdhery et al., "PaLM", 2022, https://arxiv.org/abs/2204.02311; it is a part of the
loss that is returned. The soft cap keeps logits in (-softcap, softcap), Gemma Team, "Gemma 2", 2024,
https://arxiv.org/abs/2408.00118.

Without the z-loss only differences of logits matter. So everything is computed of `z - max(z)`: where logits are large,
lse has no digits left of its logarithm, and neither has `exp(z - lse)`, which the gradient is made of. A logit that is
NaN or infinity makes the loss NaN, as in PyTorch; minus infinity is a word that is ruled out.

A token whose target is `ignore_index` has no loss and no gradient, whatever its logits are. "mean" divides by the
number of the others, and by one where there are none: if all are ignored, the loss is zero and so are the gradients,
where PyTorch's own gives NaN.
A target that is no word (negative, or V and more) is ignored here; the public functions raise IndexError where they
check.

What `linear_cross_entropy` is for is Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024,
https://arxiv.org/abs/2411.09009: the same, without the logits in memory. Here they are, all of them.

Run in float64 this file is the oracle that every other level is held against. In a lower precision everything is
computed in float32, and the loss is float32. Plain PyTorch, no decorators: TorchScript and TorchInductor compile these
very functions.
"""

from typing import Optional

import torch
from torch import Tensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor],
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: Optional[float],
    reduction: str,
    chunk: Optional[int],
) -> Tensor:
    """Cross entropy of `hidden @ weight.T + bias`.

    Args:
        hidden: `(..., H)`, any float dtype.
        weight: `(V, H)`, as `torch.nn.Linear` has it.
        target: `(...)`, or what expands to it; integers.
        bias: `(V,)` or None.
        ignore_index: the target of tokens that do not count.
        label_smoothing: s above, from 0 to 1.
        z_loss: factor of the z-loss; 0 for none.
        softcap: bound of the logits; 0 or None for none.
        reduction: "mean", "sum" or "none".
        chunk: nothing here: all logits are held.

    Returns:
        `()`, or `(...)` for "none"; float32, or float64 for float64.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = torch.matmul(hidden.to(wide), weight.to(wide).t())
    if bias is not None:
        logits = logits + bias.to(wide)
    return cross_entropy(logits, target, ignore_index, label_smoothing, z_loss, softcap, reduction, False)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: Optional[float],
    reduction: str,
    inplace: bool,
) -> Tensor:
    """Cross entropy of logits.

    Args:
        logits: `(..., V)`, any float dtype.
        inplace: ignored: the gradient is a new tensor.

    Returns:
        As `linear_cross_entropy`.
    """
    words = logits.shape[-1]
    target = target.to(torch.int64).expand(logits.shape[:-1])
    counts = (target != ignore_index) & (target >= 0) & (target < words)
    # Zeros where nothing counts: of NaN the gradient would be zero times NaN.
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(~counts.unsqueeze(-1), 0.0)
    if softcap is not None and softcap > 0.0:
        z = softcap * torch.tanh(z / softcap)
    largest = z.detach().amax(-1, keepdim=True)
    z = z - largest
    log_sum = torch.logsumexp(z, -1)
    picked = z.gather(-1, target.clamp(0, words - 1).unsqueeze(-1)).squeeze(-1)
    loss = log_sum - (1.0 - label_smoothing) * picked
    if label_smoothing > 0.0:
        loss = loss - label_smoothing * z.mean(-1)
    if z_loss > 0.0:
        loss = loss + z_loss * (largest.squeeze(-1) + log_sum).square()
    loss = loss.masked_fill(~counts, 0.0)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / counts.sum().clamp(min=1)
