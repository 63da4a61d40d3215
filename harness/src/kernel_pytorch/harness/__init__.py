"""Declare a technique once; prove it, time it, explain it.

What is of quick use from Python can be imported from here; nothing is loaded until it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_pytorch.harness.profiling import profile_module
    from kernel_pytorch.harness.quick import (
        compare_implementations,
        compare_levels,
        profile_memory,
        quick_benchmark,
        scaling,
    )

__all__ = [
    "compare_implementations",
    "compare_levels",
    "profile_memory",
    "profile_module",
    "quick_benchmark",
    "scaling",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where = "profiling" if name == "profile_module" else "quick"
    return getattr(importlib.import_module(f"{__name__}.{where}"), name)
