"""An activation written out.

Each step writes a tensor, and autograd keeps most of them. One operator keeps its input alone.

When not: where no operator computes the formula.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "activation"
COUNTS = ("operators", "saved")


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, a: Tensor) -> Tensor:
        h = self.layer(a)
        return 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044715 * h**3)))


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        return F.gelu(self.before.layer(a), approximate="tanh")


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(256, 64).requires_grad_(),)]
