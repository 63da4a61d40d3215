"""`package.module:factory`: what makes the module that is profiled."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from kernel_pytorch.harness.errors import UserError

FactoryError = UserError
WANTED = "(module, inputs) or (module, inputs, kwargs)"


@dataclass(frozen=True)
class Made:
    """What a factory returned: a module, and its inputs by position and by name."""

    module: torch.nn.Module
    inputs: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def make(target: str) -> Made:
    """Import a factory and call it.

    Args:
        target: `package.module:factory`; the current folder is on the path, as with `python -m`. The factory takes no
            arguments and returns `(module, inputs)` or `(module, inputs, kwargs)`; inputs are a tuple or a list, or
            one tensor.

    Raises:
        UserError: the string is of another form, the module cannot be imported, it has no such attribute, the
            factory raised, or it returned something else.
    """
    name, colon, attribute = target.partition(":")
    if not (name and colon and attribute):
        raise UserError(f"given {target!r}; give package.module:factory, as in models.small:make")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(name)
    except Exception as error:  # whatever the module does when it is imported
        raise UserError(f"module {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        found = operator.attrgetter(attribute)(found)
    except AttributeError:
        raise UserError(f"module {name!r} has no attribute {attribute!r}") from None
    if not callable(found):
        raise UserError(f"{target} is of type {type(found).__name__}; it must be a function without arguments")
    try:
        with contextlib.suppress(ValueError):  # a builtin has no signature
            inspect.signature(found).bind()
    except TypeError as error:
        raise UserError(f"{target} takes arguments ({error}); it must be a function without arguments") from error
    try:
        made = found()
    except Exception as error:
        raise UserError(f"{target} raised {type(error).__name__}: {error}{place_of(error)}") from error
    return _checked(target, made)


def moved(made: Made, device: torch.device) -> Made:
    """The same on a device: module, and every tensor of the inputs."""
    inputs, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(device), (made.inputs, dict(made.kwargs)))
    return Made(made.module.to(device), inputs, kwargs)


def place_of(error: BaseException) -> str:
    """File and line of the innermost frame, in brackets, for the end of a message."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return "" if frame is None else f" ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})"


def _checked(target: str, made: Any) -> Made:
    def refuse(what: str) -> UserError:
        return UserError(f"{target} returned {what}; it must return {WANTED}")

    if not isinstance(made, tuple):
        raise refuse(type(made).__name__)
    if len(made) not in (2, 3):
        raise refuse(f"{len(made)} values")
    module, inputs, kwargs = (*made, {})[:3]
    if not isinstance(module, torch.nn.Module):
        raise refuse(f"{type(module).__name__} as module")
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, list | tuple):
        raise refuse(f"{type(inputs).__name__} as inputs")
    if not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise refuse(f"{kwargs!r} as kwargs")
    return Made(module, tuple(inputs), kwargs)
