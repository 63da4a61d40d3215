"""Gradients inside a forward.

`requires_grad_` and `torch.autograd.grad` run the engine of autograd; `torch.func.grad` is traced.

When not: where the gradient is of something outside the compiled part.
"""

import torch
from torch import Tensor, nn

from .recipe import Same

DETECTOR = "graph-break"
COUNTS = ("breaks",)


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            (g,) = torch.autograd.grad(a.sin().sum(), a)
        return g


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        return torch.func.grad(lambda t: t.sin().sum())(a)
