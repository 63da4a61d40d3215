"""Activations of every layer kept.

Each block keeps its input alone, and computes the rest again in the backward.

When not: where memory suffices: it costs one more forward.
"""

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .recipe import Same, x

DETECTOR = "checkpointing"
COUNTS = ("saved",)
TRAIN = True


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, a: Tensor) -> Tensor:
        for block in self.blocks:
            a = a + block(a)
        return a


class After(Same):
    def forward(self, a: Tensor) -> Tensor:
        for block in self.before.blocks:
            a = a + checkpoint(block, a, use_reentrant=False)
        return a


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(128, 64).requires_grad_(),)]
