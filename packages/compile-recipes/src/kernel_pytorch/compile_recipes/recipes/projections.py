"""Several linear layers of one input.

One product of the joined weights reads the input once, and fills the GPU better than several small ones.

When not: where the layers have adapters, hooks or other dtypes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "shared_linear"
COUNTS = ("products", "moved")


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, a: Tensor) -> Tensor:
        return self.q(a) + self.k(a) * self.v(a)


class After(Same):
    def __init__(self, before: Before) -> None:
        super().__init__(before)
        self.weight = nn.Parameter(torch.cat([p.detach() for p in before.parameters()]))

    def forward(self, a: Tensor) -> Tensor:
        q, k, v = F.linear(a, self.weight).chunk(3, -1)
        return q + k * v


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(512, 64),)]
