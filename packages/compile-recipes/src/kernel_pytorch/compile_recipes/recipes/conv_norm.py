"""Batch norm of a convolution, in evaluation.

In evaluation a batch norm is a scale and a shift of each channel, which the weights of the convolution can hold.

When not: in training, or where the model will be trained again.
"""

import torch
from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "conv_norm"
COUNTS = ("operators", "moved")


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)

    def forward(self, a: Tensor) -> Tensor:
        return self.norm(self.conv(a))


class After(Same):
    def __init__(self, before: Before) -> None:
        super().__init__(before)
        self.conv = torch.nn.utils.fuse_conv_bn_eval(before.conv.eval(), before.norm.eval())

    def forward(self, a: Tensor) -> Tensor:
        return self.conv(a)


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(4, 4, 16, 16),)]
