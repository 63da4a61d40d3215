"""FLOP formulas of the operators, for `torch.utils.flop_counter.FlopCounterMode`.

Importing `torch.utils.flop_counter` imports Triton, which importing this package must not; so the formulas are
registered when somebody else imports it, before anything can be counted.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

COUNTER = "torch.utils.flop_counter"

# Square, add and two products an element forward, eleven operations backward.
FLOPS_PER_ELEMENT = {"rms_norm": 4, "add_rms_norm": 5, "rms_norm_backward": 11}


def register_when_counted() -> None:
    """Register the formulas now if the counter is imported already, else as soon as it is."""
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _AfterImport())


def _register(counter: ModuleType) -> None:
    for name, factor in FLOPS_PER_ELEMENT.items():

        def formula(shape: Sequence[int], *args: Any, factor: int = factor, **kwargs: Any) -> int:
            return factor * torch.Size(shape).numel()

        counter.register_flop_formula(getattr(torch.ops.kernel_pytorch, name))(formula)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the others find the counter and registers once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
