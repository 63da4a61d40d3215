"""Level "cuda": what the package kernel_pytorch.cuda_ops offers, where it is installed.

This module imports it eagerly, not on first use: its operators must be registered before anything is traced.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

DISTRIBUTION = "kernel-pytorch-cuda-ops"
NEEDED = (0, 1)
"""The first version of it whose functions are what the packages call."""


def check_version() -> None:
    """Raise ImportError if an older version is installed; of sources that are not installed nothing is known."""
    try:
        found = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < NEEDED:
        needed = ".".join(map(str, NEEDED))
        raise ImportError(f"{DISTRIBUTION} {found} is installed; {needed} or later is needed: install it again")


cuda_ops: ModuleType | None = None
_why_absent = ""
try:
    check_version()
    cuda_ops = importlib.import_module("kernel_pytorch.cuda_ops")
    if cuda_ops.__spec__ is not None and cuda_ops.__spec__.origin is None:
        cuda_ops, _why_absent = None, f"of {DISTRIBUTION} a folder without its code is there; install it again"
except ModuleNotFoundError as error:
    if error.name != "kernel_pytorch.cuda_ops":
        raise
    _why_absent = f"{DISTRIBUTION} is not installed (in a checkout of kernel-pytorch: pip install ./packages/cuda-ops)"
except ImportError as error:
    _why_absent = str(error)


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the level cannot run there, or None if it can."""
    if cuda_ops is None:
        return _why_absent
    # A mask of bools is read as it is; nothing else is of that dtype.
    return cuda_ops.levels.unavailable("cuda", device, torch.float32 if dtype == torch.bool else dtype)


def describe(device: torch.device) -> str:
    """What was compiled for that kind of device, and where it was verified."""
    return "" if cuda_ops is None else cuda_ops.levels.describe("cuda", device)


def function(name: str) -> Callable[..., Any]:
    """The function of that name; one that raises ImportError where the package is not installed."""
    if cuda_ops is not None:
        return getattr(cuda_ops, name)

    def absent(*arguments: Any, **keywords: Any) -> Any:
        raise ImportError(f"level 'cuda' of {name} cannot run here: {_why_absent}")

    return absent
