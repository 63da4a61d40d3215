"""FLOP formulas of the operators, for `torch.utils.flop_counter.FlopCounterMode`.

Importing `torch.utils.flop_counter` imports Triton, which importing this package must not; so the formulas are
registered when somebody else imports it, before anything can be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from .after_import import after_import

# Square, add and two products an element forward, eleven operations backward.
FLOPS_PER_ELEMENT = {"rms_norm": 4, "add_rms_norm": 5, "rms_norm_backward": 11}


def register_when_counted() -> None:
    """Register the formulas now if the counter is imported already, else as soon as it is."""
    after_import("torch.utils.flop_counter", _register)


def _register(counter: ModuleType) -> None:
    for name, factor in FLOPS_PER_ELEMENT.items():

        def formula(shape: Sequence[int], *args: Any, factor: int = factor, **kwargs: Any) -> int:
            return factor * torch.Size(shape).numel()

        counter.register_flop_formula(getattr(torch.ops.kernel_pytorch, name))(formula)
