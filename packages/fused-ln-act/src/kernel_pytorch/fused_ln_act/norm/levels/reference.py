"""Norm, residual, dropout and activation, defined.

    h = residual + dropout(x)                        with a residual, else h = x
    y = activation(norm(h))                          with a residual, else y = dropout(activation(norm(h)))

    layer norm:  norm(h) = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps) * weight + bias
    RMS norm:    norm(h) = h / sqrt(mean(h^2) + eps) * weight                    means run over the last dimension

Ba, Kiros and Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450; Zhang and Sennrich, "Root Mean
Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467. Dropout is applied where transformers apply
it: to what a block adds to the residual stream (Vaswani et al., 2017, section 5.4), and after the activation of a
layer. Its mask is that of `philox.py`; `dropout_p` 0 needs no seed.

Run in float64 this file is the oracle that every other level is held against. In a lower precision everything is
computed in float32 and rounded to the dtype of h: h once, before it is normalised, and y once. Plain PyTorch, no
decorators: TorchScript and TorchInductor compile these very functions.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.philox import dropout
from kernel_pytorch.fused_ln_act.rules.activations import activate


def normalize(h: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, norm: str) -> Tensor:
    """Normalise the last dimension of `h`, in float32 or wider.

    Args:
        h: `(..., N)`, any float dtype.
        weight: `(N,)` or None.
        bias: `(N,)` or None.
        eps: added to the variance or mean square.
        norm: "layer" or "rms".
    """
    z = h.to(torch.promote_types(h.dtype, torch.float32))
    if norm == "layer":
        z = z - z.mean(-1, keepdim=True)
    z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        z = z * weight.to(z.dtype)
    if bias is not None:
        z = z + bias.to(z.dtype)
    return z


def drop(x: Tensor, seed: Optional[Tensor], dropout_p: float) -> Tensor:
    """Dropout, which is nothing at probability 0."""
    if dropout_p == 0.0:
        return x
    assert seed is not None
    return dropout(x, seed, dropout_p)


def add(x: Tensor, residual: Tensor, seed: Optional[Tensor], dropout_p: float) -> Tensor:
    """`residual + dropout(x)` in the promoted dtype of both."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return (residual.to(wide) + drop(x.to(wide), seed, dropout_p)).to(dtype)


def layer_norm(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float) -> Tensor:
    """Normalise the last dimension of `x`.

    Args:
        x: `(..., N)`, any float dtype.
        weight: `(N,)`, any float dtype; None for no scale.
        bias: `(N,)`, any float dtype; None for no shift.
        eps: added to the variance.

    Returns:
        `(..., N)` in the dtype of x.
    """
    return normalize(x, weight, bias, eps, "layer").to(x.dtype)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    dropout_p: float,
    seed: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:
    """Add to the residual stream, then normalise.

    Args:
        x: `(..., N)`, the output of the previous block.
        residual: `(..., N)`, the residual stream.
        dropout_p: probability that an element of x is dropped.
        seed: int64 `()`, or None where `dropout_p` is 0.

    Returns:
        `y`, and `h` in the promoted dtype of x and residual: the residual stream of the next block.
    """
    h = add(x, residual, seed, dropout_p)
    return layer_norm(h, weight, bias, eps), h


def layer_norm_act(
    x: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    activation: str,
    dropout_p: float,
    seed: Optional[Tensor],
) -> Tensor:
    """Normalise, activate, drop.

    Args:
        activation: one of `ACTIVATIONS`.
        dropout_p: probability that an element of the result is dropped.

    Returns:
        `(..., N)` in the dtype of x.
    """
    return drop(activate(normalize(x, weight, bias, eps, "layer"), activation), seed, dropout_p).to(x.dtype)


def add_layer_norm_act(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    eps: float,
    activation: str,
    dropout_p: float,
    seed: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:
    """Add to the residual stream, then normalise and activate; arguments and results as of `add_layer_norm`."""
    h = add(x, residual, seed, dropout_p)
    return activate(normalize(h, weight, bias, eps, "layer"), activation).to(h.dtype), h


def rms_norm_act(
    x: Tensor, weight: Optional[Tensor], eps: float, activation: str, dropout_p: float, seed: Optional[Tensor]
) -> Tensor:
    """As `layer_norm_act`, with the root mean square."""
    return drop(activate(normalize(x, weight, None, eps, "rms"), activation), seed, dropout_p).to(x.dtype)


def add_rms_norm_act(
    x: Tensor,
    residual: Tensor,
    weight: Optional[Tensor],
    eps: float,
    activation: str,
    dropout_p: float,
    seed: Optional[Tensor],
) -> Tuple[Tensor, Tensor]:
    """As `add_layer_norm_act`, with the root mean square."""
    h = add(x, residual, seed, dropout_p)
    return activate(normalize(h, weight, None, eps, "rms"), activation).to(h.dtype), h
