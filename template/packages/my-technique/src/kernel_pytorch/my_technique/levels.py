"""Which level runs where: the names, the default, and the reason why a level cannot run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from . import native, reference
from .capability import compute_capability
from .compile_limit import limited

LEVELS = ("reference", "native", "torchscript", "compile")
MINIMUM_CAPABILITY = (8, 0)

# Compute capabilities on which Triton kernels of this package were verified and measured fastest; everywhere else the
# default is native. Before the first entry it needs a test that holds it against the committed results.
TRITON_IS_FASTEST: frozenset[tuple[int, int]] = frozenset()

HAS_TRITON = find_spec("triton") is not None
HAS_NUMPY = find_spec("numpy") is not None


def default_level(device: torch.device, dtype: torch.dtype, elements: int) -> str:
    """The level that `level=None` means: the fastest one measured on this device that needs no compiler, else native.

    It goes by the device alone. Levels round differently, and the result of a row must not depend on how many rows
    there are.
    """
    if device.type == "cuda" and HAS_TRITON and compute_capability(device) in TRITON_IS_FASTEST:
        return "triton"
    return "native"


def unavailable(level: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this level cannot run there, or None if it can."""
    if level != "triton":
        return None
    if not HAS_TRITON:
        return "triton is not installed (pip install triton)"
    if device.type == "cuda":
        capability = compute_capability(device)
        if capability < MINIMUM_CAPABILITY:
            return f"compute capability is {capability[0]}.{capability[1]}; Triton kernels need 8.0"
        return None
    if device.type != "cpu" or os.environ.get("TRITON_INTERPRET", "").lower() not in ("1", "true", "yes", "on", "y"):
        return f"device is {device.type}; Triton needs CUDA, or TRITON_INTERPRET=1 to check kernels on the CPU"
    if not HAS_NUMPY:
        return "Triton's interpreter needs numpy (pip install numpy)"
    if dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    return None


def check_level(level: str | None) -> None:
    """Raise ValueError, listing the levels, unless this is one of them or None."""
    if level is not None and level not in LEVELS:
        raise ValueError(f"level: given {level!r}; allowed are None, {', '.join(map(repr, LEVELS))}")


def resolve(level: str | None, x: Tensor) -> Callable[..., Any]:
    """The level's function, or an error that names what is allowed.

    Raises:
        ValueError: no such level.
        RuntimeError: the level exists but cannot run on the device or dtype of x, with the reason.
    """
    check_level(level)
    if level is None:
        level = default_level(x.device, x.dtype, 0)
    reason = unavailable(level, x.device, x.dtype)
    if reason is not None:
        raise RuntimeError(f"level {level!r} cannot run here: {reason}")
    if level == "native":
        return native.my_technique
    if level == "reference" or torch.compiler.is_compiling():
        # The levels below are the reference under a compiler of their own; whoever traces now compiles it already.
        return reference.my_technique
    module = importlib.import_module(f"{__package__}.{'jit' if level == 'torchscript' else 'compiled'}")
    function = module.my_technique
    return function if level == "torchscript" else limited("my_technique", function)
