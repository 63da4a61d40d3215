"""FLOP formulas of the operators, for `torch.utils.flop_counter.FlopCounterMode`.

Importing `torch.utils.flop_counter` imports Triton, which importing this package must not; so the formulas are
registered when somebody else imports it, before anything can be counted.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from .after_import import after_import

# Of a logit: exponential, sums and comparison forward; exponential, difference and products backward.
FORWARD, BACKWARD = 4, 5


def register_when_counted() -> None:
    """Register the formulas now if the counter is imported already, else as soon as it is."""
    after_import("torch.utils.flop_counter", _register)


# Shapes in the place of tensors.


def linear_flops(hidden: Any, weight: Any, *_: Any, **__: Any) -> int:
    """A product, and what is made of each logit."""
    return _logits(hidden, weight) * (2 * weight[1] + FORWARD)


def linear_backward_flops(dloss: Any, normalizer: Any, hidden: Any, weight: Any, *rest: Any, **__: Any) -> int:
    """The product again, and one for each of the two gradients that are products."""
    need_dhidden, need_dweight, _ = rest[-3:]
    return _logits(hidden, weight) * (2 * weight[1] * (1 + need_dhidden + need_dweight) + BACKWARD)


def logits_flops(logits: Any, *_: Any, **__: Any) -> int:
    """What is made of each logit."""
    return FORWARD * torch.Size(logits).numel()


def logits_backward_flops(dloss: Any, normalizer: Any, logits: Any, *_: Any, **__: Any) -> int:
    """What is made of each logit."""
    return BACKWARD * torch.Size(logits).numel()


def _logits(hidden: Any, weight: Any) -> int:
    return torch.Size(hidden[:-1]).numel() * weight[0]


def _register(counter: ModuleType) -> None:
    for name, formula in (
        ("linear_cross_entropy", linear_flops),
        ("linear_cross_entropy_backward", linear_backward_flops),
        ("cross_entropy", logits_flops),
        ("cross_entropy_backward", logits_backward_flops),
    ):
        counter.register_flop_formula(getattr(torch.ops.kernel_pytorch, name))(formula)
