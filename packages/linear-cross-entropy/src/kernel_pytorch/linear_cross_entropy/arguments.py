"""Checks of the public functions' arguments. Each error says what was given and what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import TARGETS

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REDUCTIONS = ("mean", "sum", "none")


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


def check_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise TypeError or ValueError unless these are the input and the parameters of one linear layer."""
    check_tensor("hidden", hidden)
    check_tensor("weight", weight)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        shapes = f"shape is {shape_of(weight)}; for hidden of shape {shape_of(hidden)}"
        raise ValueError(f"weight: {shapes} it must have two dimensions, the last {hidden.shape[-1]}")
    if weight.shape[0] == 0:
        raise ValueError(f"weight: shape is {shape_of(weight)}; it must have at least one row")
    if bias is not None:
        check_tensor("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias: shape is {shape_of(bias)}; it must be {shape_of(weight)[:1]}")


def check_like_hidden(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise TypeError or ValueError unless the parameters have the dtype and the device of hidden."""
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if parameter.dtype != hidden.dtype:
            raise TypeError(f"{name}: dtype is {parameter.dtype}; it must be that of hidden, {hidden.dtype}")
        if parameter.device != hidden.device:
            raise ValueError(f"{name}: device is {parameter.device}; it must be that of hidden, {hidden.device}")


def check_target(target: Tensor, rows: Tensor, name: str) -> None:
    """Raise TypeError or ValueError unless there is one integer for each of the rows; no value is looked at."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target: given {type(target).__name__}; it must be a torch.Tensor")
    if target.dtype not in TARGETS:
        raise TypeError(
            f"target: dtype is {target.dtype}; allowed are torch.int64, torch.int32 (probabilities of words are not)"
        )
    if target.shape != rows.shape[:-1]:
        shapes = f"shape is {shape_of(target)}; for {name} of shape {shape_of(rows)}"
        raise ValueError(f"target: {shapes} it must be {shape_of(rows)[:-1]}")
    if target.device != rows.device:
        raise ValueError(f"target: device is {target.device}; it must be that of {name}, {rows.device}")


def check_scalars(
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, reduction: str
) -> None:
    """Raise TypeError or ValueError, naming the argument, unless these are numbers that can be computed with."""
    _check_integer("ignore_index", ignore_index, "an integer")
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index: given {ignore_index}; it must fit into 64 bits, as targets do")
    _check_number("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing: given {label_smoothing}; allowed is 0 to 1")
    _check_number("z_loss", z_loss)
    if z_loss < 0.0:
        raise ValueError(f"z_loss: given {z_loss}; it must not be negative")
    if softcap is not None:
        _check_number("softcap", softcap)
        if softcap <= 0.0:
            raise ValueError(f"softcap: given {softcap}; it must be above 0, or None for none")
        if not 1e-30 <= softcap <= 1e30:
            raise ValueError(f"softcap: given {softcap}; allowed is what float32 divides by, 1e-30 to 1e30")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: given {reduction!r}; allowed are {', '.join(map(repr, REDUCTIONS))}")


def check_chunk(chunk: int | None) -> None:
    """Raise TypeError or ValueError unless this is None or how many words a chunk may have."""
    if chunk is None:
        return
    _check_integer("chunk", chunk, "an integer or None")
    if chunk < 1:
        raise ValueError(f"chunk: given {chunk}; it must be at least 1")


def check_flag(name: str, value: bool) -> None:
    """Raise unless this is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: given {value!r}; it must be True or False")


def _check_integer(name: str, value: int, wanted: str) -> None:
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        raise TypeError(f"{name}: given {type(value).__name__}; it must be {wanted}")


def _check_number(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}: given {type(value).__name__}; it must be a Python number")
    if not abs(value) < float("inf"):
        raise ValueError(f"{name}: given {value}; it must be finite")


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The shape, as errors print it."""
    return tuple(tensor.shape)
