"""Whether an implementation can run, and be timed, on a device, and why not."""

from __future__ import annotations

import functools
import os
import shutil
from typing import Any

import torch

from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.interpreter import is_interpreting
from kernel_pytorch.harness.peers import Peer
from kernel_pytorch.harness.technique import Implementation, Level, Operation, Technique

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def parse_device(name: str | None) -> torch.device:
    """The device of that name, which must exist; the best one for None.

    Raises:
        UserError: no such device here; the message lists what exists.
    """
    available = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name is None:
        return torch.device(available[1] if len(available) > 1 else "cpu")
    if name == "cuda" and len(available) > 1:
        name = available[1]
    if name not in available:
        raise UserError(f"no device {name!r}; available here are: {', '.join(available)}")
    return torch.device(name)


def why_unavailable(
    technique: Technique, implementation: Implementation, device: torch.device, dtype: torch.dtype
) -> str | None:
    """The reason why this implementation cannot run on that device in that dtype, or None."""
    reason = implementation.why_absent(device, dtype)
    if reason is None and not isinstance(implementation, Peer):
        reason = technique.ladder().unavailable(implementation.level.value, device, dtype)
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
    """The reason why this implementation cannot be timed there, or None."""
    reason = why_unavailable(technique, implementation, device, dtype)
    if isinstance(implementation, Peer) and reason is not None:
        return reason
    if implementation.level in (Level.TRITON, Level.PEER) and device.type == "cpu" and is_interpreting():
        return "no GPU: Triton's interpreter checks results, its time means nothing"
    return reason


def description(technique: Technique, implementation: Implementation, device: torch.device) -> str:
    """The technique's own description of a level there, or ""."""
    describe = getattr(technique.ladder(), "describe", None)
    return describe(implementation.level.value, device) if describe is not None else ""


def default_for(
    technique: Technique, operation: Operation, implementation: Implementation, device: torch.device
) -> str:
    """For which inputs `level=None` means this implementation: "yes", "", or dtypes and features, for tables."""
    ladder = technique.ladder()
    found = [dtype for dtype in DTYPES if ladder.default(operation.name, device, dtype) == implementation.name]
    said = "yes" if len(found) == len(DTYPES) else ", ".join(str(dtype).removeprefix("torch.") for dtype in found)
    features = () if said == "yes" else _features(ladder, operation.name, implementation.name, device)
    said = "; ".join(filter(None, (said, f"with {', '.join(features)}" if features else "")))
    return f"{said} (not measured here)" if said and _unmeasured(ladder, operation, implementation, device) else said


def _features(ladder: Any, function: str, level: str, device: torch.device) -> list[str]:
    """The features for each of which this level is the default of 16-bit tensors, though without any it is not."""
    named = dict.fromkeys(feature for row in getattr(ladder, "defaults", ()) for feature in row.features or ())
    half = torch.bfloat16
    if not named or ladder.default(function, device, half) == level:
        return []
    return [feature for feature in named if ladder.default(function, device, half, features=[feature]) == level]


def _unmeasured(ladder: Any, operation: Operation, implementation: Implementation, device: torch.device) -> bool:
    """Whether a row without a record makes this level a default there."""
    return any(
        row.record is None
        and row.level == implementation.name
        and ladder.deciding_row(operation.name, device, dtype, features=features) is row
        for row in getattr(ladder, "defaults", ())
        for features in ([[feature] for feature in row.features] if row.features else [[]])
        for dtype in DTYPES
    )


@functools.cache
def _cpp_compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))), None)
