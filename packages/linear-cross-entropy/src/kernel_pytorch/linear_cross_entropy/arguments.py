"""Checks of arguments that are this package's own. Each error says what was given and what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from ._core.arguments import check_choice, check_device, check_integer, check_number, check_tensor, shape_of
from .rules.cross_entropy import counted

TARGETS = (torch.int64, torch.int32)
REDUCTIONS = ("mean", "sum", "none")


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
        check_device(name, parameter, hidden, "hidden")


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
    check_device("target", target, rows, name)


def check_words(target: Tensor, words: int, ignore_index: int) -> None:
    """Raise IndexError, naming the first one and its place, unless every target is a word or to be ignored.

    A GPU is waited for.
    """
    wrong = ~counted(target, words, ignore_index) & (target.to(torch.int64) != ignore_index)
    if not wrong.any():
        return
    place = tuple(wrong.nonzero()[0].tolist())
    allowed = f"allowed are 0 to {words - 1}, and ignore_index {ignore_index}"
    raise IndexError(f"target: {int(target[place])} at position {place}; {allowed}")


def check_scalars(
    ignore_index: int, label_smoothing: float, z_loss: float, softcap: float | None, reduction: str
) -> None:
    """Raise TypeError or ValueError, naming the argument, unless these are numbers that can be computed with."""
    check_integer("ignore_index", ignore_index)
    if not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index: given {ignore_index}; it must fit into 64 bits, as targets do")
    check_number("label_smoothing", label_smoothing)
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing: given {label_smoothing}; allowed is 0 to 1")
    check_number("z_loss", z_loss)
    if z_loss < 0.0:
        raise ValueError(f"z_loss: given {z_loss}; it must not be negative")
    if softcap is not None:
        check_number("softcap", softcap)
        if softcap <= 0.0:
            raise ValueError(f"softcap: given {softcap}; it must be above 0, or None for none")
        if not 1e-30 <= softcap <= 1e30:
            raise ValueError(f"softcap: given {softcap}; allowed is what float32 divides by, 1e-30 to 1e30")
    check_choice("reduction", reduction, REDUCTIONS)


def check_chunk(chunk: int | None) -> None:
    """Raise TypeError or ValueError unless this is None or how many words a chunk may have."""
    if chunk is None:
        return
    check_integer("chunk", chunk, "an integer or None")
    if chunk < 1:
        raise ValueError(f"chunk: given {chunk}; it must be at least 1")
