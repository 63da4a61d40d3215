"""Task norm: replace a norm and an activation written by hand by one operator each.

Values, gradients and names of parameters stay. A forward runs ten operators or more today, each of which reads its
inputs from memory and writes its result; three are enough. `kernel-pytorch learn --check norm.py` counts them.
"""

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """LayerNorm, a linear layer and GELU: `(rows, 24)` to `(rows, 48)`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(24) + 0.5)
        self.bias = nn.Parameter(torch.rand(24))
        self.layer = nn.Linear(24, 48)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        h = self.layer(centred / torch.sqrt(variance + 1e-5) * self.weight + self.bias)
        return 0.5 * h * (1 + torch.erf(h / 2**0.5))
