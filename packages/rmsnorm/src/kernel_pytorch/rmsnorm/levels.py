"""Which level runs where: the names, the default, and the reason why a level cannot run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from . import autograd, cuda_level, native, reference
from .capability import compute_capability
from .compile_limit import limited
from .differentiable import is_transformed

LEVELS = ("reference", "native", "torchscript", "compile", "triton", "cuda")
KERNELS = ("triton", "cuda")
MINIMUM_CAPABILITY = (8, 0)

# Compute capabilities on which the Triton kernels were verified and measured fastest. A test holds this against the
# committed results; everywhere else the default is native.
TRITON_IS_FASTEST: frozenset[tuple[int, int]] = frozenset({(9, 0)})

# Dtypes in which the CPU twin of the CUDA kernels was measured to be no slower than native in any case; the same test
# holds it.
TWIN_IS_FASTEST: frozenset[torch.dtype] = frozenset({torch.bfloat16})

HAS_TRITON = find_spec("triton") is not None
HAS_NUMPY = find_spec("numpy") is not None


def default_level(device: torch.device, dtype: torch.dtype, elements: int) -> str:
    """The level that `level=None` means: the fastest one measured on this device that needs no compiler, else native.

    It goes by the device alone. Levels round differently, and the result of a row must not depend on how many rows
    there are.
    """
    if device.type == "cuda" and HAS_TRITON and compute_capability(device) in TRITON_IS_FASTEST:
        return "triton"
    if device.type == "cpu" and cuda_level.cuda_ops is not None and dtype in TWIN_IS_FASTEST:
        return "cuda"
    return "native"


def unavailable(level: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this level cannot run there, or None if it can."""
    if level == "cuda":
        return cuda_level.unavailable(device, dtype)
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


def describe(level: str, device: torch.device) -> str:
    """What is worth knowing of a level that runs there, for tables."""
    return cuda_level.describe(device) if level == "cuda" else ""


def check_level(level: str | None) -> None:
    """Raise ValueError, listing the levels, unless this is one of them or None."""
    if level is not None and level not in LEVELS:
        raise ValueError(f"level: given {level!r}; allowed are None, {', '.join(map(repr, LEVELS))}")


def resolve(function: str, level: str | None, *tensors: Tensor | None) -> Callable[..., Any]:
    """The level's function, or an error that names what is allowed.

    Raises:
        ValueError: no such level.
        RuntimeError: the level exists but cannot run on this device or dtype, with the reason.
    """
    x = tensors[0]
    assert x is not None
    check_level(level)
    if level is None:
        level = default_level(x.device, x.dtype, 0)
        if level in KERNELS and is_transformed():
            level = "native"
    for tensor in tensors:
        reason = None if tensor is None else unavailable(level, tensor.device, tensor.dtype)
        if reason is not None:
            raise RuntimeError(f"level {level!r} of {function} cannot run here: {reason}")
    if level == "triton":
        return getattr(autograd, function)
    if level == "cuda":
        return cuda_level.function(function)
    if level == "native":
        return getattr(native, function)
    if level == "reference" or torch.compiler.is_compiling():
        # The levels below are the reference under a compiler of their own; whoever traces now compiles it already.
        return getattr(reference, function)
    if level == "torchscript":
        return getattr(importlib.import_module(f"{__package__}.jit"), function)
    return limited(function, getattr(importlib.import_module(f"{__package__}.compiled"), function))
