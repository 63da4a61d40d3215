"""Checks of the public functions' arguments. Each error says what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .activations import ACTIVATIONS

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise TypeError or ValueError, naming the argument, unless this is a tensor with rows that are not empty."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: given {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_nested:
        given = "nested" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name}: layout is {given}; allowed is torch.strided")
    if tensor.dtype not in DTYPES:
        allowed = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"{name}: dtype is {tensor.dtype}; allowed are {allowed}")
    if tensor.dim() == 0:
        raise ValueError(f"{name}: shape is (); it needs at least one dimension")
    if tensor.shape[-1] == 0:
        raise ValueError(f"{name}: shape is {shape_of(tensor)}; the last dimension must not be empty")


def check_like(name: str, tensor: Tensor, x: Tensor) -> None:
    """Raise unless this is a tensor of the shape and on the device of x; its dtype may differ."""
    check_tensor(name, tensor)
    if tensor.shape != x.shape:
        raise ValueError(f"{name}: shape is {shape_of(tensor)}; it must be that of x, {shape_of(x)}")
    _check_device(name, tensor, x)


def check_parameter(name: str, parameter: Tensor | None, x: Tensor) -> None:
    """Raise unless this is None or a tensor with one number for each element of a row of x."""
    if parameter is None:
        return
    check_tensor(name, parameter)
    if parameter.shape != x.shape[-1:]:
        shapes = f"shape is {shape_of(parameter)}; for x of shape {shape_of(x)}"
        raise ValueError(f"{name}: {shapes} it must be {tuple(x.shape[-1:])}")
    _check_device(name, parameter, x)


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


def check_flag(name: str, value: bool) -> None:
    """Raise unless this is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: given {value!r}; it must be True or False")


def check_activation(activation: str) -> None:
    """Raise ValueError, listing the activations, unless this is one of them."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: given {activation!r}; allowed are {', '.join(map(repr, ACTIVATIONS))}")


def check_dropout(p: float, seed: Tensor | None, x: Tensor, name: str = "dropout_p") -> None:
    """Raise unless p is a probability below one, and the seed None or an int64 scalar on the device of x."""
    check_number(name, p)
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name}: given {p}; it must be at least 0 and below 1")
    if seed is None:
        return
    if not isinstance(seed, Tensor):
        raise TypeError(f"seed: given {type(seed).__name__}; it must be a torch.Tensor, such as torch.tensor(3)")
    if seed.dtype != torch.int64:
        raise TypeError(f"seed: dtype is {seed.dtype}; allowed is torch.int64")
    if seed.dim() != 0:
        raise ValueError(f"seed: shape is {shape_of(seed)}; it must be ()")
    _check_device("seed", seed, x)


def draw_seed(device: torch.device) -> Tensor:
    """A seed from torch's generator of that device: an int64 scalar there, which nobody waits for."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape as messages print it."""
    return tuple(tensor.shape)


def names_of(modules: Iterable[torch.nn.Module]) -> str:
    """The classes of these as messages print them."""
    return ", ".join(type(module).__name__ for module in modules) or "nothing"


def _check_device(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(f"{name}: device is {tensor.device}; it must be that of x, {x.device}")
