"""Swish, defined.

    y = x * sigmoid(beta * x)

Ramachandran, Zoph and Le, "Searching for Activation Functions", 2017, https://arxiv.org/abs/1710.05941.
With beta = 1 it is SiLU, with beta = 1.702 close to GELU.

Run in float64 this file is the oracle that every other level is held against. 16-bit input is computed in float32 and
rounded once. Plain PyTorch, no decorators: TorchScript and TorchInductor compile this very function.
"""

import torch
from torch import Tensor


def my_technique(x: Tensor, beta: float) -> Tensor:
    """Multiply every element by its own sigmoid.

    Args:
        x: `(...)`, any float dtype.
        beta: how steep the sigmoid is; above 0.

    Returns:
        `(...)`, the dtype of x.
    """
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    return (h * torch.sigmoid(beta * h)).to(x.dtype)
