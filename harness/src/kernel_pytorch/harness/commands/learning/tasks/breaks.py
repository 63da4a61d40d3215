"""Task breaks: find the graph breaks that are planted in a model, and remove them all.

The result is right, and must stay what it is. Begin with `kernel-pytorch doctor breaks.py:make`, which names each line
and what to write instead. `kernel-pytorch learn --check breaks.py` says what is left.
"""

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """A layer with a residual, and a mean of what is positive: `(batch, length, 16)` to `(batch, 16)`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        self.steps += 1
        h = torch.tanh(self.first(x)) * (1 + 0 * self.steps)
        if h.norm() > 10:
            h = h / (h.norm().item() / 10)
        print("a step", end="\r")
        y = x + self.second(h)
        rows = []
        for text in y:
            kept = text[text.sum(-1) > 0]
            rows.append(kept.mean(0) if len(kept) else torch.zeros(16))
        return torch.stack(rows)


def make() -> tuple[nn.Module, Tensor]:
    """What `doctor` examines."""
    return Model(), torch.randn(3, 5, 16)
