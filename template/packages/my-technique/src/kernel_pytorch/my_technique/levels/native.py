"""PyTorch's best operator: `torch.nn.functional.silu`, one kernel if beta is 1, else three kernels and two casts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def my_technique(x: Tensor, beta: float) -> Tensor:
    """The function of `reference.py` through `F.silu`; same arguments, same result dtype."""
    if beta == 1.0:
        return F.silu(x)
    # In 16 bits the product would be rounded before the sigmoid sees it.
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    return (F.silu(beta * h) / beta).to(x.dtype)
