"""A norm written out.

Mean, difference, square, mean, root and quotient are six passes over memory; one operator makes one or two.

When not: where the statistics themselves are wanted.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "layer_norm"
COUNTS = ("operators", "saved")


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        centred = a - a.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        return F.layer_norm(a, (64,))


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(256, 64).requires_grad_(),)]
