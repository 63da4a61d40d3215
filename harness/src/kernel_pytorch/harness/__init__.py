"""Declare a technique once; prove it, time it, explain it.

The Python API can be imported from here; each name is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_pytorch.harness.api import verify
    from kernel_pytorch.harness.benchmark import Plan, bench
    from kernel_pytorch.harness.profiling import profile_module
    from kernel_pytorch.harness.quick import (
        compare_implementations,
        compare_levels,
        profile_memory,
        quick_benchmark,
        scaling,
    )

__all__ = [
    "Plan",
    "bench",
    "compare_implementations",
    "compare_levels",
    "profile_memory",
    "profile_module",
    "quick_benchmark",
    "scaling",
    "verify",
]

_WHERE = {"Plan": "benchmark", "bench": "benchmark", "profile_module": "profiling", "verify": "api"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE.get(name, 'quick')}"), name)
