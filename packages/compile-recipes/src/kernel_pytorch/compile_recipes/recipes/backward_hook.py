"""A backward hook on a module.

A full backward hook wraps the inputs and outputs of its module; a hook on a tensor or a parameter is traced.

When not: in eager.
"""

from torch import Tensor, nn

from .recipe import Same, x

DETECTOR = "graph-break"
COUNTS = ("breaks",)
TRAIN = True


class Before(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.layer.register_full_backward_hook(lambda module, before, after: None)

    def forward(self, a: Tensor) -> Tensor:
        return self.layer(a) + 1


class After(Same):
    def __init__(self, before: Before) -> None:
        super().__init__(before)
        self.layer = nn.Linear(64, 64)
        self.layer.load_state_dict(before.layer.state_dict())
        self.layer.weight.register_hook(lambda gradient: gradient)

    def forward(self, a: Tensor) -> Tensor:
        return self.layer(a) + 1


def inputs() -> list[tuple[Tensor, ...]]:
    return [(x(8, 64).requires_grad_(),)]
