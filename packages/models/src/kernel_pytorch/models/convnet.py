"""A residual convolutional network in channels_last, and folding of its norms into its convolutions."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

Model = TypeVar("Model", bound=nn.Module)


class ConvNorm(nn.Module):
    """A convolution without bias and a batch norm; after `fold` a convolution with bias.

    kernel_size is odd; the input is padded by half of it.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, bias=False)
        self.norm: nn.BatchNorm2d | None = nn.BatchNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(B, in_channels, H, W)` to `(B, out_channels, H / stride, W / stride)`."""
        x = self.conv(x)
        return x if self.norm is None else self.norm(x)


class ResidualBlock(nn.Module):
    """The basic block of ResNet: two 3 x 3 convolutions and a shortcut.

    stride is that of the first convolution. The shortcut is a 1 x 1 convolution where stride or width change.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.first = ConvNorm(in_channels, out_channels, 3, stride)
        self.second = ConvNorm(out_channels, out_channels, 3)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = ConvNorm(in_channels, out_channels, 1, stride)
        assert self.second.norm is not None
        nn.init.zeros_(self.second.norm.weight)  # the block starts as its shortcut, so that deep networks train

    def forward(self, x: Tensor) -> Tensor:
        """Map `(B, in_channels, H, W)` to `(B, out_channels, H / stride, W / stride)`."""
        y = self.second(self.first(x).relu_())
        return (y + self.shortcut(x)).relu_()


class ConvNet(nn.Module):
    """A residual network for images: a convolution, stages of residual blocks, the mean over positions, a linear layer.

    Weights are channels_last from the start, and so are all activations: convolutions then need no copies between
    layouts, on a CPU and on tensor cores. It uses none of this project's fused functions: convolutions are fast in
    PyTorch once `fold` has removed the norms.

    Args:
        in_channels: channels of an image.
        num_classes: logits of an image.
        widths: channels of each stage, at least one; each but the first halves height and width.
        depth: residual blocks in each stage, at least 1 (else ValueError).
        stem_stride: stride of the first convolution; 2 or 4 for large images.

    Source: He et al., "Deep Residual Learning", 2016, https://arxiv.org/abs/1512.03385.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        widths: Sequence[int] = (64, 128, 256),
        depth: int = 2,
        stem_stride: int = 1,
    ) -> None:
        super().__init__()
        if not widths or depth < 1:
            raise ValueError(f"widths, depth: given {tuple(widths)} and {depth}; both must be at least one")
        self.stem = ConvNorm(in_channels, widths[0], 3, stem_stride)
        blocks = []
        for stage, (before, width) in enumerate(itertools.pairwise([widths[0], *widths])):
            blocks += [ResidualBlock(before, width, stride=2 if stage else 1)]
            blocks += [ResidualBlock(width, width) for _ in range(depth - 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], num_classes)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits `(B, num_classes)` of images `(B, in_channels, H, W)`, in the dtype of the weights."""
        x = self.blocks(self.stem(x).relu_())
        return self.head(x.mean((2, 3)))


def fold(model: Model) -> Model:
    """Multiply the batch norms of `ConvNorm` into their convolutions, for inference.

    `w * (gamma / sqrt(var + eps))` is computed in float64 and rounded once, so that outputs differ by the rounding of
    one convolution. torch.compile folds only frozen models, and does not report when it does not.

    Returns a copy of the model in evaluation without batch norms, which is not meant to be trained further.
    """
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, ConvNorm) and module.norm is not None:
            dtype = module.conv.weight.dtype
            module.conv = fuse_conv_bn_eval(module.conv.double(), module.norm.double()).to(dtype)
            module.norm = None
    return model
