"""`package.module:factory`: what makes the module that is profiled."""

from __future__ import annotations

import importlib
import operator
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from kernel_pytorch.harness.errors import UserError


class Made(NamedTuple):
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
    name, _, attribute = target.partition(":")
    if not (name and attribute):
        raise UserError(f"given {target!r}; give package.module:factory, as in models.small:make")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory = operator.attrgetter(attribute)(importlib.import_module(name))
    except Exception as error:  # whatever the module does when it is imported
        raise UserError(f"{target} cannot be imported: {type(error).__name__}: {error}") from error
    try:
        made = factory()
    except Exception as error:
        raise UserError(f"{target} raised {type(error).__name__}: {error}{place_of(error)}") from error
    if isinstance(made, tuple) and len(made) in (2, 3):
        module, inputs, kwargs = (*made, {})[:3]
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        if isinstance(module, torch.nn.Module) and isinstance(inputs, list | tuple) and isinstance(kwargs, Mapping):
            return Made(module, tuple(inputs), kwargs)
    returned = (
        f"({', '.join(type(each).__name__ for each in made)})" if isinstance(made, tuple) else type(made).__name__
    )
    raise UserError(f"{target} returned {returned}; it must return (module, inputs) or (module, inputs, kwargs)")


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
