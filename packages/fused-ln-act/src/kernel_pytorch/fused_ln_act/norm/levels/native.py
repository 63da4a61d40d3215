"""PyTorch's best operators: `F.layer_norm` or `F.rms_norm`, then the activation, then `F.dropout`.

Each runs in a separate kernel and rounds its result to the dtype of x; the definition rounds once. If a parameter
has another dtype, as under autocast, the norm and the activation are computed in float32.

Without a seed dropout draws PyTorch's own mask, which is fastest; with one it draws that of `philox.py`, as every level
does.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.fused_ln_act._core.philox import dropout


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation by PyTorch's own operator where there is one."""
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    if activation == "relu_squared":
        return F.relu(_wide(x)).square().to(x.dtype)
    if activation == "quick_gelu":
        wide = _wide(x)
        return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)
    if activation == "tanh":
        return torch.tanh(x)
    if activation == "sigmoid":
        return torch.sigmoid(x)
    assert activation == "identity", activation
    return x


def _wide(x: Tensor) -> Tensor:
    """float16 as float32: between operators x times the incoming gradient overflows, and times a slope of 0 is NaN."""
    return x.float() if x.dtype == torch.float16 else x


def drop(x: Tensor, seed: Tensor | None, dropout_p: float) -> Tensor:
    """Dropout by PyTorch's own mask without a seed, else by that of the seed."""
    if dropout_p == 0.0:
        return x
    if seed is None:
        return F.dropout(x, dropout_p)
    return dropout(x.to(torch.promote_types(x.dtype, torch.float32)), seed, dropout_p).to(x.dtype)


def add(x: Tensor, residual: Tensor, seed: Tensor | None, dropout_p: float) -> Tensor:
    """`residual + dropout(x)` in the promoted dtype of both."""
    return residual + drop(x.to(torch.promote_types(x.dtype, residual.dtype)), seed, dropout_p)


def layer_norm_wide(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """The layer norm in the dtype of x, or in float32 and wider where that of a parameter is another."""
    if all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    # The fused kernel takes parameters of one dtype with x.
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps)


def rms_norm_wide(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The RMS norm in the dtype of x, or in float32 and wider where that of the weight is another."""
    if weight is None or weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.rms_norm(x.to(wide), x.shape[-1:], weight.to(wide), eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`layer_norm` of `reference.py` through `F.layer_norm`; same arguments and result dtype."""
    return layer_norm_wide(x, weight, bias, eps).to(x.dtype)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`add_layer_norm` of `reference.py`: dropout, the sum and the norm are separate kernels."""
    h = add(x, residual, seed, dropout_p)
    return layer_norm(h, weight, bias, eps), h


def layer_norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    """`layer_norm_act` of `reference.py`."""
    z = layer_norm_wide(x, weight, bias, eps)
    return drop(activate(z, activation).to(x.dtype), seed, dropout_p)


def add_layer_norm_act(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`add_layer_norm_act` of `reference.py`."""
    h = add(x, residual, seed, dropout_p)
    return activate(layer_norm_wide(h, weight, bias, eps), activation).to(h.dtype), h


def rms_norm_act(
    x: Tensor, weight: Tensor | None, eps: float, activation: str, dropout_p: float, seed: Tensor | None
) -> Tensor:
    """`rms_norm_act` of `reference.py`."""
    z = rms_norm_wide(x, weight, eps)
    return drop(activate(z, activation).to(x.dtype), seed, dropout_p)


def add_rms_norm_act(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm_act` of `reference.py`."""
    h = add(x, residual, seed, dropout_p)
    return activate(rms_norm_wide(h, weight, eps), activation).to(h.dtype), h
