"""What `declare` registers besides an operator's own functions, and checks as it does."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_BelowAutograd = torch._C._AutoDispatchBelowAutograd  # private to PyTorch


def check_schema(operator: Any, wanted: str, needed_by: str) -> None:
    """Raise ImportError unless the operator has this schema: a library of another version is refused by name."""
    schema = torch._C.parse_schema(wanted)
    if str(operator._schema) != str(schema):
        raise ImportError(f"{needed_by} needs {schema}; installed is {operator._schema}")


def below_autograd(call: Callable[..., Any]) -> Callable[..., Any]:
    """The operator without its gradient; PyTorch's own error where a GPU has no memory left."""

    def below(*arguments: Any) -> Any:
        try:
            with _BelowAutograd():
                return call(*arguments)
        except RuntimeError as error:
            if type(error) is not RuntimeError or not str(error).startswith("CUDA out of memory"):
                raise
            # The stable ABI hands on the text of an exception alone.
            raise torch.OutOfMemoryError(str(error)) from None

    return below


class LazyLauncher:
    """A launcher that is imported when it is called first.

    Attributes:
        imported: returns the launcher.

    Args:
        launch: `module:function`, or a function that returns the launcher.
    """

    def __init__(self, launch: str | Callable[[], Callable[..., Any]]) -> None:
        self.imported = functools.cache(functools.partial(_imported, launch) if isinstance(launch, str) else launch)

    def __call__(self, *arguments: Any) -> Any:
        """Launch."""
        return self.imported()(*arguments)


def _imported(launch: str) -> Callable[..., Any]:
    module, _, function = launch.partition(":")
    return getattr(importlib.import_module(module), function)


def arguments_class(schema: Any) -> Callable[..., Any]:
    """The class of objects that hold the arguments of an operator, in order and by name."""
    defaults = [a.default_value for a in schema.arguments if a.has_default_value()]
    return namedtuple("Arguments", [a.name for a in schema.arguments], defaults=defaults)


def with_arguments(schema: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that is called with the arguments of an operator, where its parameter `a` holds all of them.

    A rule without this parameter is returned as it is. Keywords that are no arguments of the operator are left out.
    """
    try:
        parameters = [*inspect.signature(rule).parameters]
    except ValueError:  # a function in C, such as torch.empty_like
        return rule
    if "a" not in parameters:
        return rule
    first, make, names = parameters.index("a"), arguments_class(schema), {a.name for a in schema.arguments}

    @functools.wraps(rule)
    def call(*arguments: Any, **keywords: Any) -> Any:
        own = {name: value for name, value in keywords.items() if name in names}
        return rule(*arguments[:first], make(*arguments[first:], **own))

    return call


def on_one_device(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake; raises if tensors are on several devices: PyTorch asks a fake if one of them is on "meta"."""

    @functools.wraps(fake)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        devices = dict.fromkeys(str(a.device) for a in arguments if isinstance(a, Tensor))
        if len(devices) > 1:
            raise RuntimeError(f"{name}: tensors are on {' and '.join(devices)}; all of them must be on one device")
        return fake(*arguments, **keywords)

    return checked
