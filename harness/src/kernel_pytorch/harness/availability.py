"""Whether an implementation can run, and be timed, on a device; and if not, why."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
from typing import Any

import torch

from kernel_pytorch.harness.discovery import UnknownNameError
from kernel_pytorch.harness.interpreter import is_interpreting
from kernel_pytorch.harness.peers import Peer
from kernel_pytorch.harness.technique import Implementation, Level, Operation, Technique

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = {"small": 2**10, "large": 2**30}
"""Numbers of elements that a default may depend on."""


def parse_device(name: str | None) -> torch.device:
    """The device of that name, which must exist; the best one for None.

    Raises:
        UnknownNameError: no such device here; the message lists what exists.
    """
    available = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name is None:
        return torch.device(available[1] if len(available) > 1 else "cpu")
    if name == "cuda" and len(available) > 1:
        name = available[1]
    if name not in available:
        raise UnknownNameError(f"no device {name!r}; available here are: {', '.join(available)}")
    return torch.device(name)


def levels_module(technique: Technique) -> Any:
    """The technique's module that says which level runs where."""
    return importlib.import_module(technique.levels)


def why_unavailable(
    technique: Technique, implementation: Implementation, device: torch.device, dtype: torch.dtype
) -> str | None:
    """The reason why this implementation cannot run on that device in that dtype, or None."""
    if isinstance(implementation, Peer):
        reason = implementation.why_absent(device, dtype)
    else:
        reason = levels_module(technique).unavailable(implementation.level.value, device, dtype)
    if reason is None and implementation.level is Level.COMPILE and device.type == "cpu" and not _cpp_compiler():
        reason = "torch.compile needs a C++ compiler on the CPU, and neither $CXX, g++ nor clang++ is on PATH"
    if reason is None:
        try:
            implementation.load()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return reason


def why_not_timed(
    technique: Technique, implementation: Implementation, device: torch.device, dtype: torch.dtype
) -> str | None:
    """The reason why this implementation's time cannot be told there, or None."""
    reason = why_unavailable(technique, implementation, device, dtype)
    if isinstance(implementation, Peer) and reason is not None:
        return reason
    if implementation.level in (Level.TRITON, Level.PEER) and device.type == "cpu" and is_interpreting():
        return "no GPU: Triton's interpreter checks results, its time means nothing"
    return reason


def description(technique: Technique, implementation: Implementation, device: torch.device) -> str:
    """What the technique's own module of levels says about a level there, or nothing."""
    describe = getattr(levels_module(technique), "describe", None)
    return describe(implementation.level.value, device) if describe is not None else ""


def default_for(
    technique: Technique, operation: Operation, implementation: Implementation, device: torch.device
) -> str:
    """For which inputs `level=None` means this implementation: "yes", "", or the dtypes and sizes, for tables."""
    module = levels_module(technique)
    by_operation = getattr(module, "default_level_of", None)
    default = module.default_level if by_operation is None else functools.partial(by_operation, operation.name)
    asked = [(dtype, size, elements) for dtype in DTYPES for size, elements in SIZES.items()]
    found = [
        (dtype, size) for dtype, size, elements in asked if default(device, dtype, elements) == implementation.name
    ]
    if len(found) == len(asked):
        return "yes"
    whole = [str(d).removeprefix("torch.") for d in DTYPES if all((d, size) in found for size in SIZES)]
    parts = [f"{str(d).removeprefix('torch.')} {s}" for d, s in found if str(d).removeprefix("torch.") not in whole]
    return ", ".join([*whole, *parts])


@functools.cache
def _cpp_compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))), None)
