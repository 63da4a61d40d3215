"""Level "cuda": what the package kernel_pytorch.cuda_ops offers, where it is installed.

It is imported here, and not when it is asked for: its operators have to be there before anything is traced.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

cuda_ops: ModuleType | None = None
_why_absent = ""
try:
    cuda_ops = importlib.import_module("kernel_pytorch.cuda_ops")
except ModuleNotFoundError:
    _why_absent = (
        "kernel-pytorch-cuda-ops is not installed (in a checkout of kernel-pytorch: pip install ./packages/cuda-ops)"
    )
except ImportError as error:
    _why_absent = str(error)


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the level cannot run there, or None if it can."""
    return _why_absent if cuda_ops is None else cuda_ops.levels.unavailable("cuda", device, dtype)


def describe(device: torch.device) -> str:
    """What was compiled for that kind of device, and where it was verified."""
    return "" if cuda_ops is None else cuda_ops.levels.describe("cuda", device)


def function(name: str) -> Callable[..., Any]:
    """The function of that name.

    Raises:
        ValueError: kernel_pytorch.cuda_ops has none.
    """
    found = getattr(cuda_ops, name, None)
    if found is None:
        raise ValueError(f"level: {name} has no level 'cuda'; kernel_pytorch.cuda_ops does not offer it")
    return found
