"""Checks of the public function's arguments. Each error says what was given and what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(name: str, tensor: Tensor) -> None:
    """Raise TypeError, naming the argument, unless this is a strided tensor of an allowed dtype."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: given {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_nested:
        given = "nested" if tensor.is_nested else tensor.layout
        raise TypeError(f"{name}: layout is {given}; allowed is torch.strided")
    if tensor.dtype not in DTYPES:
        allowed = ", ".join(str(dtype) for dtype in DTYPES)
        raise TypeError(f"{name}: dtype is {tensor.dtype}; allowed are {allowed}")


def check_number(name: str, value: float) -> None:
    """Raise TypeError or ValueError, naming the argument, unless this is a Python number, finite and above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}: given {type(value).__name__}; it must be a Python number")
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name}: given {value}; it must be finite and above 0")
