"""Checks of operator arguments. Each error names the function that was called and says what was given.

Before a call, the checks cover only errors that the code behind it would miss or find too late. Other errors cost
nothing until a call fails: `explained` then writes the message. Code that torch.compile traces skips both.
"""

from __future__ import annotations

import functools
import math
import numbers
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LARGEST = sys.float_info.max

KINDS = {
    "Tensor": "a tensor",
    "Optional[Tensor]": "a tensor or None",
    "float": "a Python number",
    "Optional[float]": "a Python number or None",
    "int": "an integer",
    "bool": "True or False",
    "str": "a string",
}
"""What an argument must be, by its type in the schema."""

DTYPES = {
    "mask": (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    "target": (torch.int64, torch.int32),
    "position_ids": (torch.int64, torch.int32),
}
"""By name of the argument: dtypes of tensors that are not like the others, which the library names itself."""

SYMBOLS = (torch.SymInt, torch.SymFloat)


@functools.cache
def _places(operator: Any) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    """Place and name of each tensor, and whether it may be None; of each number, and the least that is allowed; of
    everything else that PyTorch would take a bool or a number for, its kind and the types that need no second look.
    """
    arguments = [(place, a.name, str(a.type)) for place, a in enumerate(operator._schema.arguments)]
    plain = {"int": (int,), "bool": (bool,), "Optional[float]": (float, type(None))}
    return (
        tuple((place, name, kind != "Tensor") for place, name, kind in arguments if "Tensor" in kind),
        tuple((place, name, 0.0 if name == "eps" else -LARGEST) for place, name, kind in arguments if kind == "float"),
        tuple((place, name, kind, plain[kind]) for place, name, kind in arguments if kind in plain),
    )


def check(function: str, operator: Any, arguments: Sequence[Any]) -> None:
    """Check tensors for being tensors, numbers for being finite, eps for not being negative too, flags for being bools.

    Args:
        function: that was called, for messages.
        operator: that will be.
        arguments: of the operator.

    Raises:
        TypeError: an argument is not of its kind.
        ValueError: a number is not allowed.
    """
    tensors, scalars, others = _places(operator)
    for place, name, optional in tensors:
        given = arguments[place]
        if not isinstance(given, Tensor) and (given is not None or not optional):
            raise TypeError(_not_of_kind(function, name, given, "Optional[Tensor]" if optional else "Tensor"))
    for place, name, least in scalars:
        given = arguments[place]
        if type(given) is not float or not least <= given <= LARGEST:
            _check_number(function, name, given, least)
    for place, name, kind, plain in others:
        if place < len(arguments) and type(arguments[place]) not in plain:
            _check_kind(function, name, arguments[place], kind)


def check_tensor(function: str, name: str, given: Tensor) -> None:
    """Raise TypeError unless this is a tensor with a shape and strides; for those who look at it before `check`."""
    if not isinstance(given, Tensor):
        raise TypeError(_not_of_kind(function, name, given, "Tensor"))
    if given.is_nested or given.layout != torch.strided:
        raise TypeError(_not_strided(function, name, given))


def explained(function: str, operator: Any, arguments: Sequence[Any], error: Exception) -> Exception | None:
    """What an operator's error means to who called the function; None where it says that already.

    Args:
        function: that was called.
        operator: that failed.
        arguments: of the operator.
        error: that it raised.
    """
    text = str(error)
    names = [operator._schema.name.rpartition("::")[2]]
    for argument, given in zip(operator._schema.arguments, arguments, strict=False):
        name = argument.name
        names.append(name)
        if f"for argument '{name}'" in text:  # PyTorch's, with the whole declaration, and every number of a tensor
            return TypeError(_not_of_kind(function, name, given, str(argument.type)))
        if isinstance(given, Tensor) and (given.is_nested or given.layout != torch.strided):
            return TypeError(_not_strided(function, name, given))
        if isinstance(given, Tensor) and given.is_quantized:
            return TypeError(f"{function}: {name}: dtype is {given.dtype}; allowed is what dequantize() gives")
        if isinstance(given, Tensor) and given.dtype not in DTYPES.get(name, (given.dtype,)):
            allowed = ", ".join(map(str, DTYPES[name]))
            return RuntimeError(f"{function}: {name}: dtype is {given.dtype}; allowed are {allowed}")
    # The library names its operator, which several functions may share, or the argument alone.
    subject, colon, rest = text.partition(": ")
    if type(error) is not RuntimeError or not colon or subject not in names:
        return None
    return RuntimeError(f"{function}: {rest if subject == names[0] else text}")


def _check_number(function: str, name: str, given: Any, least: float) -> None:
    if isinstance(given, SYMBOLS):
        return  # not known before the graph runs
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(_not_of_kind(function, name, given, "float"))
    if not math.isfinite(given):
        raise ValueError(f"{function}: {name}: given {given}; it must be finite")
    if given < least:
        raise ValueError(f"{function}: {name}: given {given}; it must not be negative")


def _check_kind(function: str, name: str, given: Any, kind: str) -> None:
    allowed = {"int": numbers.Integral, "bool": bool, "Optional[float]": numbers.Real}[kind]
    if not isinstance(given, (allowed, *SYMBOLS)) or (kind != "bool" and isinstance(given, bool)):
        raise TypeError(_not_of_kind(function, name, given, kind))


def _not_strided(function: str, name: str, given: Tensor) -> str:
    layout, way = ("nested", "to_padded_tensor") if given.is_nested else (given.layout, "to_dense")
    return f"{function}: {name}: layout is {layout}; allowed is torch.strided, which {way}() gives"


def _not_of_kind(function: str, name: str, given: Any, kind: str) -> str:
    if given is None or isinstance(given, (str, bool)):
        what = repr(given)
    else:
        what = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
    return f"{function}: {name}: given {what}; it must be {KINDS[kind]}"
