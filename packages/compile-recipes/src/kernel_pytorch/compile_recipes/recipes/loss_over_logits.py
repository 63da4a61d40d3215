"""A loss over all logits.

All logits, and their gradient, are the largest tensors of a language model. In chunks that are computed again in the
backward none of it is kept; `linear_cross_entropy` does this without computing twice.

When not: for vocabularies of a few thousand words.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .recipe import Same, x

DETECTOR = "loss"
COUNTS = ("saved",)
TRAIN = True
SILENT = False


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4096, bias=False)

    def forward(self, a: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(a), target)


class After(Same):
    def forward(self, a: Tensor, target: Tensor) -> Tensor:
        parts = [
            checkpoint(self.part, rows, labels, use_reentrant=False)
            for rows, labels in zip(a.chunk(4), target.chunk(4), strict=True)
        ]
        return torch.stack(parts).sum() / len(target)

    def part(self, rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.before.head(rows), labels, reduction="sum")


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(256, 64).requires_grad_(), torch.arange(256))]
