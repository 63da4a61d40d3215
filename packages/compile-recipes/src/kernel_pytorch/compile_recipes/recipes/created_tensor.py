"""A tensor of Python values in every call.

`torch.tensor([...])`, and `torch.arange(n)` without a device, are made by the host. On a GPU each call copies them, and
waits for the copy. A buffer is copied once, with the model; `device=x.device` makes the values where they are needed.

When not: for values that change with each call: pass them as a tensor.
"""

import torch
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "created"
COUNTS = ("operators",)


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return a * torch.tensor([0.25, 0.5, 1.0, 2.0]) + torch.arange(4)


class After(Same):
    def __init__(self, before: Before) -> None:
        super().__init__(before)
        self.register_buffer("scale", torch.tensor([0.25, 0.5, 1.0, 2.0]), persistent=False)
        self.register_buffer("places", torch.arange(4), persistent=False)

    def forward(self, a: Tensor) -> Tensor:
        return a * self.scale + self.places


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(8, 4),)]
