"""Small products in a loop.

A small product leaves most of a GPU idle; `torch.bmm` launches all at once.

When not: where the products are large, or of many shapes.
"""

import torch
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "small_products"
COUNTS = ("operators", "products")


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16) for _ in range(8))

    def forward(self, a: Tensor) -> Tensor:
        return torch.stack([a[i] @ w for i, w in enumerate(self.weights)])


class After(Same):
    def __init__(self, before: Before) -> None:
        super().__init__(before)
        self.weights = nn.Parameter(torch.stack([w.detach() for w in before.weights]))

    def forward(self, a: Tensor) -> Tensor:
        return torch.bmm(a, self.weights)


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(8, 32, 16),)]
