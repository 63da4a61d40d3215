"""The best that PyTorch itself offers: its matrix products, a part of the vocabulary at a time (`kernels/chunked.py`).

On a GPU `cross_entropy` is PyTorch's own, in float32. On a CPU that function adds the exponentials of a row one after
the other, and the error of 50,000 additions exceeds all other errors together, so there `torch.sum` adds them. With
`inplace`, and only then, `cross_entropy` is the operator, whose backward overwrites the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.linear_cross_entropy.kernels.chunked import column
from kernel_pytorch.linear_cross_entropy.losses import linear_loss, logits_loss, reduce
from kernel_pytorch.linear_cross_entropy.rules.cross_entropy import counted, wide_dtype


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk: int,
) -> Tensor:
    """`linear_cross_entropy` of `reference.py`, without all of its logits at a time."""
    scalars = ignore_index, label_smoothing, z_loss, softcap
    return linear_loss(hidden, weight, target, bias, *scalars, reduction, chunk, "native")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    inplace: bool,
) -> Tensor:
    """`cross_entropy` of `reference.py` through `F.cross_entropy`, on a CPU through the sum of exponentials."""
    if inplace and not torch.compiler.is_compiling():
        scalars = ignore_index, label_smoothing, z_loss, softcap
        return logits_loss(logits, target, *scalars, reduction, True, "native")
    z = logits.to(wide_dtype(logits.dtype))
    target = target.to(torch.int64).expand(z.shape[:-1])
    counts = counted(target, z.shape[-1], ignore_index)
    if z.device.type == "cpu":
        z = z.masked_fill(~counts[..., None], 0.0)  # else the gradient would be zero times what may be NaN
    if softcap > 0.0:
        z = softcap * torch.tanh(z / softcap)
    if z.device.type == "cpu" or z_loss > 0.0:
        largest = z.detach().amax(-1, keepdim=True)
        relative = z - largest
        log_sum = relative.exp().sum(-1).log()
    if z.device.type == "cpu":
        found = relative.gather(-1, column(target, z.shape[-1])).squeeze(-1)
        loss = log_sum - (1.0 - label_smoothing) * found
        if label_smoothing > 0.0:
            loss = loss - label_smoothing * relative.mean(-1)
        loss = loss.masked_fill(~counts, 0.0)
    else:
        # A GPU answers to a target that is no word by an assertion that ends the process.
        target = target.masked_fill(~counts, ignore_index)
        loss = F.cross_entropy(
            z.flatten(0, -2) if z.dim() > 2 else z,
            target.flatten() if z.dim() > 2 else target,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        ).view(target.shape)
    if z_loss > 0.0:
        loss = loss + z_loss * (largest.squeeze(-1) + log_sum).square().masked_fill(~counts, 0.0)
    return reduce(loss, target, z.shape[-1], ignore_index, reduction)
