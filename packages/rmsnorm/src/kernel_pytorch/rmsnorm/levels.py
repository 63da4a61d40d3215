"""Which level runs where: the names, the default, and the reason why a level cannot run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from . import autograd, native, reference

LEVELS = ("reference", "native", "torchscript", "compile", "triton")
MINIMUM_CAPABILITY = (8, 0)

# What was measured fastest, compilers left out because their first call takes seconds. A test holds both against the
# committed results; everywhere else the default is native.
TRITON_IS_FASTEST: frozenset[tuple[int, int]] = frozenset()  # compute capabilities
REFERENCE_IS_FASTEST = 2**20  # elements of 16 bits on a CPU: F.rms_norm has no fused kernel there, and does more passes

HAS_TRITON = find_spec("triton") is not None


def default_level(device: torch.device, dtype: torch.dtype, elements: int) -> str:
    """The level that `level=None` means for x of this device, dtype and size: the fastest one measured there."""
    if device.type == "cuda" and HAS_TRITON and _capability(device) in TRITON_IS_FASTEST:
        return "triton"
    if device.type == "cpu" and dtype.itemsize == 2 and elements >= REFERENCE_IS_FASTEST:
        return "reference"
    return "native"


def unavailable(level: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this level cannot run there, or None if it can."""
    if level != "triton":
        return None
    if not HAS_TRITON:
        return "triton is not installed (pip install triton)"
    if device.type == "cuda":
        capability = _capability(device)
        if capability < MINIMUM_CAPABILITY:
            return f"compute capability is {capability[0]}.{capability[1]}; Triton kernels need 8.0"
        return None
    if device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1":
        return f"device is {device.type}; Triton needs CUDA, or TRITON_INTERPRET=1 to check kernels on the CPU"
    if dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    return None


def _capability(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)  # unlike get_device_capability, Dynamo folds this
    return properties.major, properties.minor


def resolve(function: str, level: str | None, *tensors: Tensor | None) -> Callable[..., Any]:
    """The level's function, or an error that names what is allowed.

    Raises:
        ValueError: no such level.
        RuntimeError: the level exists but cannot run on this device or dtype, with the reason.
    """
    x = tensors[0]
    assert x is not None
    if level is None:
        # A traced size is a symbol: asking how large it is would bind the graph to the answer.
        level = default_level(x.device, x.dtype, 0 if torch.compiler.is_compiling() else x.numel())
    elif level not in LEVELS:
        raise ValueError(f"level: given {level!r}; allowed are None, {', '.join(map(repr, LEVELS))}")
    for tensor in tensors:
        reason = None if tensor is None else unavailable(level, tensor.device, tensor.dtype)
        if reason is not None:
            raise RuntimeError(f"level {level!r} of {function} cannot run here: {reason}")
    if level == "triton":
        return getattr(autograd, function)
    if level == "native":
        return getattr(native, function)
    if level == "reference" or torch.compiler.is_compiling():
        # The levels below are the reference under a compiler of their own; whoever traces now compiles it already.
        return getattr(reference, function)
    return getattr(
        importlib.import_module(f"{__package__}.{'jit' if level == 'torchscript' else 'compiled'}"), function
    )
