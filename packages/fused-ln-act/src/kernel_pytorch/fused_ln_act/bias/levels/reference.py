"""Bias and activation, and bias, dropout and residual add, defined.

    bias_act:          y = activation(x + bias)
    bias_dropout_add:  y = residual + dropout(x + bias)

The two ends of a transformer's feed-forward, and the end of its attention (Vaswani et al., "Attention Is All You Need",
2017, sections 3.3 and 5.4, https://arxiv.org/abs/1706.03762); fused so first by Shoeybi et al., "Megatron-LM", 2019,
https://arxiv.org/abs/1909.08053. The activations are those of `activations.py`, the mask is that of `philox.py`; `p` 0
needs no seed.

Run in float64 this file is the oracle that every other level is held against. In a lower precision everything is
computed in float32 and rounded once. Plain PyTorch, no decorators: TorchScript and TorchInductor compile these very
functions.
"""

from typing import Optional

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.philox import dropout
from kernel_pytorch.fused_ln_act.rules.activations import activate


def bias_act(x: Tensor, bias: Optional[Tensor], activation: str) -> Tensor:
    """Add the bias, then activate.

    Args:
        x: `(..., N)`, any float dtype.
        bias: `(N,)`, any float dtype; None for the activation alone.
        activation: one of `ACTIVATIONS`.

    Returns:
        `(..., N)` in the dtype of x.
    """
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    if bias is not None:
        z = z + bias.to(z.dtype)
    return activate(z, activation).to(x.dtype)


def bias_dropout_add(x: Tensor, bias: Optional[Tensor], residual: Tensor, p: float, seed: Optional[Tensor]) -> Tensor:
    """Add the bias, drop, add to the residual stream.

    Args:
        x: `(..., N)`, any float dtype.
        bias: `(N,)`, any float dtype; None for no bias.
        residual: `(..., N)`, any float dtype.
        p: the probability that an element of `x + bias` is dropped.
        seed: int64 `()`, or None where `p` is 0.

    Returns:
        `(..., N)` in the promoted dtype of x and residual.
    """
    dtype = torch.promote_types(x.dtype, residual.dtype)
    z = x.to(torch.promote_types(dtype, torch.float32))
    if bias is not None:
        z = z + bias.to(z.dtype)
    if p > 0.0:
        assert seed is not None
        z = dropout(z, seed, p)
    return (residual.to(z.dtype) + z).to(dtype)
