"""FLOP formulas of the operators, for `torch.utils.flop_counter.FlopCounterMode`.

Importing `torch.utils.flop_counter` imports Triton, which importing this package must not; so the formulas are
registered when somebody else imports it, before anything can be counted.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from .after_import import after_import

# Operations of an activation and of its derivative; a transcendental function counts as one.
FLOPS_OF_ACTIVATION = {
    "gelu": (5, 9),
    "gelu_tanh": (9, 13),
    "silu": (4, 7),
    "relu": (1, 1),
    "relu_squared": (2, 2),
    "quick_gelu": (5, 8),
    "tanh": (1, 3),
    "sigmoid": (3, 5),
    "identity": (0, 0),
}


def register_when_counted(formulas: dict[str, Callable[..., int]]) -> None:
    """Register formulas now if the counter is imported already, else as soon as it is.

    Args:
        formulas: by operator, a function of its arguments that takes shapes in the place of tensors.
    """

    def register(counter: ModuleType) -> None:
        for name, formula in formulas.items():
            counter.register_flop_formula(getattr(torch.ops.kernel_pytorch, name))(formula)

    after_import("torch.utils.flop_counter", register)
