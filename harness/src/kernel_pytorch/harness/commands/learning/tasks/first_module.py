"""Task first-module: mend a module until it is one graph for texts of every length.

The result is right, and must stay what it is. But a value leaves the tensors for Python, and a number on the module
changes in each call. `kernel-pytorch learn --check first_module.py` says what is left.
"""

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """Scales each batch down to a half at most, and averages over the text: `(batch, length, 16)` to `(batch, 16)`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        self.calls += 1
        y = torch.relu(self.layer(x)) * (1 + 0 * self.calls)
        largest = y.abs().max().item()
        if largest > 0.5:
            y = y * (0.5 / largest)
        return y.mean(1)
