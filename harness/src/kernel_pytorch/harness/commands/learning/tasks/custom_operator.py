"""Task custom-operator: make a function one operator for autograd, for the compiler and for export.

The function stands for a kernel of yours: PyTorch cannot look into it. Give the operator a fake, which only says what
comes out, and a gradient. `kernel-pytorch learn --check custom_operator.py`.
"""

import torch
from torch import Tensor


@torch.library.custom_op("learn::swish", mutates_args=())
def swish(x: Tensor) -> Tensor:
    """`x * sigmoid(x)`, of any shape."""
    return torch.from_numpy(x.detach().numpy() / (1 + (-x.detach()).exp().numpy()))
