"""Which level runs where: the names, the default, and the reason why a level cannot run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cuda_level
from .capability import compute_capability
from .compile_limit import limited
from .differentiable import is_transformed

LEVELS = ("reference", "native", "torchscript", "compile", "triton", "cuda")
KERNELS = ("triton", "cuda")
MINIMUM_CAPABILITY = (8, 0)

# The group of each operation, whose levels are modules of one folder.
GROUP_OF: Mapping[str, str] = {
    **dict.fromkeys(("layer_norm", "add_layer_norm", "layer_norm_act", "add_layer_norm_act"), "norm"),
    **dict.fromkeys(("rms_norm_act", "add_rms_norm_act"), "norm"),
    **dict.fromkeys(("swiglu", "geglu", "reglu"), "gated"),
    **dict.fromkeys(("bias_act", "bias_dropout_add"), "bias"),
    "softmax": "softmax",
    **dict.fromkeys(("linear_act", "gated_mlp"), "linear"),
}

# By group, the compute capabilities on which its Triton kernels were verified and measured fastest. A test holds this
# against the committed results; everywhere else the default is native.
TRITON_IS_FASTEST: Mapping[str, frozenset[tuple[int, int]]] = {
    "norm": frozenset({(9, 0)}),
    "gated": frozenset({(9, 0)}),
    "bias": frozenset({(9, 0)}),
    "softmax": frozenset(),
    "linear": frozenset({(9, 0)}),
}

# By group, the dtypes for which that holds, if not for all: products of float32 and float64 are no work for tensor
# cores. Of linear layers bfloat16 was measured; float16 is as many bytes and the same instructions.
TRITON_DTYPES: Mapping[str, frozenset[torch.dtype]] = {"linear": frozenset({torch.float16, torch.bfloat16})}

# By group, those on which its CUDA kernels were; they come before Triton's.
CUDA_IS_FASTEST: Mapping[str, frozenset[tuple[int, int]]] = {
    "norm": frozenset(),
    "gated": frozenset(),
    "bias": frozenset(),
    "softmax": frozenset({(9, 0)}),
    "linear": frozenset(),
}

# By group, the dtypes in which the CPU twin of the CUDA kernels was measured to be no slower than native in any case.
TWIN_IS_FASTEST: Mapping[str, frozenset[torch.dtype]] = {
    "norm": frozenset(),
    "gated": frozenset({torch.bfloat16}),
    "bias": frozenset(),
    "softmax": frozenset({torch.bfloat16, torch.float32}),
    "linear": frozenset(),
}

# The operations that have a level "cuda", and the module of kernel_pytorch.cuda_ops that it is in.
COMPILED = {
    **dict.fromkeys(("layer_norm", "add_layer_norm", "layer_norm_act", "add_layer_norm_act"), "norm_act"),
    **dict.fromkeys(("rms_norm_act", "add_rms_norm_act"), "norm_act"),
    **dict.fromkeys(("swiglu", "geglu", "reglu"), "gated"),
    "bias_act": "bias_act",
    "bias_dropout_add": "bias_dropout_add",
    "softmax": "softmax",
}

HAS_TRITON = find_spec("triton") is not None
HAS_NUMPY = find_spec("numpy") is not None


class Group(NamedTuple):
    """The levels of one group of operations; the same function has the same name in each of these modules.

    Attributes:
        reference: the definition.
        native: PyTorch's own operators.
        compiled: what the compile level hands to torch.compile.
        triton: functions with gradients around the kernels; importing it imports no Triton.
    """

    reference: ModuleType
    native: ModuleType
    compiled: ModuleType
    triton: ModuleType


def default_level(device: torch.device, dtype: torch.dtype, elements: int) -> str:
    """What `default_level_of` says of all operations, or native where they differ."""
    found = {default_level_of(operation, device, dtype, elements) for operation in GROUP_OF}
    return found.pop() if len(found) == 1 else "native"


def default_level_of(operation: str, device: torch.device, dtype: torch.dtype, elements: int) -> str:
    """The level that `level=None` means: the fastest one measured on this device that needs no compiler, else native.

    It goes by the device and the dtype alone. Levels round differently, and the result of a row must not depend on how
    many rows there are.
    """
    group, compiled = GROUP_OF[operation], operation in COMPILED
    if device.type == "cpu" and compiled and cuda_level.cuda_ops is not None and dtype in TWIN_IS_FASTEST[group]:
        return "cuda"
    if device.type == "cuda":
        capability = compute_capability(device)
        if compiled and capability in CUDA_IS_FASTEST[group] and unavailable("cuda", device, dtype) is None:
            return "cuda"
        if HAS_TRITON and capability in TRITON_IS_FASTEST[group] and dtype in TRITON_DTYPES.get(group, (dtype,)):
            return "triton"
    return "native"


def unavailable(level: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this level cannot run there, or None if it can."""
    if level == "cuda":
        # A mask of bools is read as it is; nothing else is of that dtype.
        return cuda_level.unavailable(device, torch.float32 if dtype == torch.bool else dtype)
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


def resolve(group: Group, function: str, level: str | None, *tensors: Tensor | None) -> Callable[..., Any]:
    """The level's function, or an error that names what is allowed.

    Args:
        group: of the operation.
        function: the operation's name.
        level: as the user gave it.
        tensors: the floating-point arguments, the principal one first.

    Raises:
        ValueError: no such level, or not of this operation.
        RuntimeError: the level exists but cannot run on this device or dtype, with the reason.
    """
    name = chosen(function, level, *tensors)
    if name == "triton":
        return getattr(group.triton, function)
    if name == "cuda":
        return cuda_level.function(function)
    if name == "native":
        return getattr(group.native, function)
    if name == "compile" and torch.compiler.is_compiling():
        return getattr(group.compiled, function)  # whoever traces now compiles it already
    if name == "reference" or torch.compiler.is_compiling():
        return getattr(group.reference, function)  # which TorchScript compiles: Dynamo would not look into that
    package = group.reference.__name__.rpartition(".")[0]
    if name == "torchscript":
        return getattr(importlib.import_module(f"{package}.jit"), function)
    return limited(function, getattr(importlib.import_module(f"{package}.compiled"), function))


def chosen(function: str, level: str | None, *tensors: Tensor | None) -> str:
    """The name of the level that `resolve` would take; same arguments and errors."""
    x = tensors[0]
    assert x is not None
    check_level(level)
    if level is None:
        level = default_level_of(function, x.device, x.dtype, 0)
        if level in KERNELS and (is_transformed() or _why_not(level, tensors) is not None):
            level = "native"
        return level
    if level == "cuda" and function not in COMPILED:
        raise ValueError(f"level: 'cuda' of {function} does not exist yet; it has {', '.join(map(repr, LEVELS[:-1]))}")
    reason = _why_not(level, tensors)
    if reason is not None:
        raise RuntimeError(f"level {level!r} of {function} cannot run here: {reason}")
    return level


def _why_not(level: str, tensors: tuple[Tensor | None, ...]) -> str | None:
    """Why a level cannot run for one of these tensors; what is alike is asked once, as short calls wait for answers."""
    asked = []
    for tensor in tensors:
        if tensor is not None and (kind := (tensor.device, tensor.dtype)) not in asked:
            asked.append(kind)
            if (reason := unavailable(level, *kind)) is not None:
                return reason
    return None
