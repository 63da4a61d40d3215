"""PyTorch's best operators: the sum, then `F.gelu` or another activation, or `F.dropout`, each in a separate kernel.

Each result is rounded to the dtype of x, or of residual where that is wider, which the definition does once. Without a
seed dropout draws PyTorch's own mask, which is fastest; with one it draws that of `philox.py`, as every level does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act.norm.levels.native import activate, drop


def bias_act(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """`bias_act` of `reference.py` through PyTorch's own activation."""
    return activate(x if bias is None else x + bias, activation).to(x.dtype)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """`bias_dropout_add` of `reference.py` through `F.dropout`."""
    dtype = torch.promote_types(x.dtype, residual.dtype)
    x = x.to(dtype)
    return (residual + drop(x if bias is None else x + bias, seed, p)).to(dtype)
