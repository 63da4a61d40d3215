"""Random numbers of NumPy.

The number is made by Python in each call; `torch.rand` is an operator of the graph, on the device of the data.

When not: where the very same sequence of numbers is needed.
"""

import numpy as np
import torch
from torch import Tensor, nn

from .recipe import Same

DETECTOR = "graph-break"
COUNTS = ("breaks", "graphs")


class Before(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return a.sin() + 0 * np.random.uniform(0.5, 1.0)


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        return a.sin() + 0 * torch.rand((), device=a.device)
