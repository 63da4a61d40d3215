"""Checks of the arguments of public functions. Each error says what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .call_kinds import can_bypass_dispatcher
from .direct_calls import check_memory

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise TypeError or ValueError, naming the argument, unless this is a tensor with rows that are not empty."""
    check_floats(name, tensor)
    if tensor.dim() == 0:
        raise ValueError(f"{name}: shape is (); it needs at least one dimension")
    if tensor.shape[-1] == 0:
        raise ValueError(f"{name}: shape is {shape_of(tensor)}; the last dimension must not be empty")


def check_floats(name: str, tensor: Tensor) -> None:
    """Raise TypeError or ValueError, naming it, unless this is a strided tensor of an allowed dtype that has memory."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: given {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_nested:
        given = "nested" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name}: layout is {given}; allowed is torch.strided")
    if tensor.dtype not in DTYPES:
        allowed = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"{name}: dtype is {tensor.dtype}; allowed are {allowed}")
    check_filled(name, tensor)


def check_filled(name: str, tensor: Tensor) -> None:
    """Raise ValueError, naming it, if the memory of this tensor was freed.

    Some of PyTorch's own operators read what was freed, and end the process.
    """
    if not torch.compiler.is_compiling() and (tensor.is_cpu or tensor.is_cuda) and can_bypass_dispatcher(tensor):
        check_memory(name, tensor)


def check_like(name: str, tensor: Tensor, x: Tensor, of: str = "x") -> None:
    """Raise unless this is a tensor of the shape and on the device of x, called `of`; its dtype may differ."""
    check_tensor(name, tensor)
    if tensor.shape != x.shape:
        raise ValueError(f"{name}: shape is {shape_of(tensor)}; it must be that of {of}, {shape_of(x)}")
    check_device(name, tensor, x, of)


def check_parameter(name: str, parameter: Tensor | None, x: Tensor, dimensions: int = 1) -> None:
    """Raise unless this is None or a tensor of the shape of the last `dimensions` of x, on its device."""
    if parameter is None:
        return
    check_tensor(name, parameter)
    if parameter.shape != x.shape[-dimensions:]:
        shapes = f"shape is {shape_of(parameter)}; for x of shape {shape_of(x)}"
        raise ValueError(f"{name}: {shapes} it must be {tuple(x.shape[-dimensions:])}")
    check_device(name, parameter, x)


def check_device(name: str, tensor: Tensor, x: Tensor, of: str = "x") -> None:
    """Raise ValueError unless the tensor is on the device of x, called `of`."""
    if tensor.device != x.device:
        raise ValueError(f"{name}: device is {tensor.device}; it must be that of {of}, {x.device}")


def check_eps(eps: float) -> None:
    """Raise unless this is a number, finite and not negative."""
    check_number("eps", eps)
    if eps < 0.0:
        raise ValueError(f"eps: given {eps}; it must not be negative")


def check_number(name: str, value: float) -> None:
    """Raise unless this is a finite Python number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}: given {type(value).__name__}; it must be a Python number")
    if not abs(value) < float("inf"):
        raise ValueError(f"{name}: given {value}; it must be finite")


def check_integer(name: str, value: int, wanted: str = "an integer") -> None:
    """Raise TypeError unless this is an integer, and no bool."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name}: given {type(value).__name__}; it must be {wanted}")


def check_flag(name: str, value: bool) -> None:
    """Raise unless this is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: given {value!r}; it must be True or False")


def check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise ValueError, listing what is allowed, unless this is one of it."""
    if value not in allowed:
        raise ValueError(f"{name}: given {value!r}; allowed are {', '.join(map(repr, allowed))}")


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape as messages print it."""
    return tuple(tensor.shape)
