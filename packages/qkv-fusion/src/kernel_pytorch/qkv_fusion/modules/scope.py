"""`Scope`: the forward of a module whose layers are fused, in which they share one product per call.

What the layers share belongs to the call and ends with it: the class's forward runs on a copy of the module, in whose
place of each layer there is a part of that call's product. So calls of other threads, calls within calls, recomputation
and exceptions never see it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.qkv_fusion._core.stock import HOOKS, has_hooks

from .group import LinearGroup, Member

HARMLESS = (
    "mask", "position", "pos_", "bias", "cache", "past", "freq", "cos", "sin", "rot", "rope", "seqlen", "length",
    "lens", "index", "idx", "ids", "scale", "alibi", "height", "width",
)  # fmt: skip
"""Parts of names of arguments that layers never read instead of the first argument."""


SPECIAL = (*HOOKS, "forward")
"""Attributes of a layer that the product of the group would bypass."""


class Scope:
    """State of the forward of one module whose layers are fused; `method` is that forward.

    Layers compute one by one in a call with another tensor that they could read, as in cross-attention, and where
    they have hooks or a custom forward, or were replaced.

    Args:
        module: whose forward it is.
        groups: the names of the layers of each group.

    Attributes:
        forward: that of a patch, where there is one.
    """

    forward: MethodType

    def __init__(self, module: torch.nn.Module, groups: Sequence[Sequence[str]]) -> None:
        self.module, self.groups = module, [tuple(names) for names in groups]
        kind: Any = type(module)
        self.others, self.traced = other_inputs(kind.forward), _traced(kind)
        self.shadowing = _shadowing(module)

    @property
    def _kernel_pytorch_holds(self) -> torch.nn.Module:  # stock.HOLDS
        return self.module

    @property
    def method(self) -> MethodType:
        """The forward. Modules of one class share its function, so Dynamo compiles one graph for all of them."""
        kind: Any = type(self.module)
        return MethodType(_forward_of(kind), self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "traced"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kind: Any = type(state["module"])
        self.__dict__.update(state, traced=_traced(kind))


STATE = ("training", "_parameters", "_buffers")
"""What Dynamo and the methods of torch.nn.Module read of a module itself."""


def _shadowing(module: torch.nn.Module) -> list[str]:
    """Names that a stand-in must have itself: what its class has is not asked of the module."""
    own = {name for name in module.__dict__ if name != "forward" and hasattr(type(module), name)}
    for kind in type(module).__mro__[: type(module).__mro__.index(torch.nn.Module)]:
        own |= {n for n, value in vars(kind).items() if not n.startswith("__") and _is_data(value)}
    return [*STATE, *sorted(own)]


def _is_data(value: Any) -> bool:
    """Whether a class attribute may be replaced by one of an instance: no method, property or other descriptor."""
    return not hasattr(value, "__get__")


@functools.cache
def _forward_of(kind: Any) -> Callable[..., Any]:
    """Make a method of `Scope` with the signature of the class's forward, once for each class."""

    @functools.wraps(kind.forward)
    def method(self: Scope, *args: Any, **kwargs: Any) -> Any:
        """Run the class's forward with one product per group."""
        module, inner = self.module, self.__dict__.get("forward")
        forward = type(module).forward if inner is None else inner.__func__
        if self.others and _has_other(self.others, args, kwargs):
            return forward(module, *args, **kwargs)
        parts = _parts(module, self.groups)
        if not parts:
            return forward(module, *args, **kwargs)
        if torch.compiler.is_compiling():  # Dynamo of torch 2.10 does not trace what is done to `__dict__`
            view: Any = object.__new__(self.traced)
            object.__setattr__(view, "_view", (module, parts))
            object.__setattr__(view, "_modules", {**module._modules, **parts})
            for name in self.shadowing:
                object.__setattr__(view, name, getattr(module, name))
        else:
            view = object.__new__(type(module))
            view.__dict__.update(module.__dict__)
            del view.__dict__["forward"]
            view.__dict__["_modules"] = {**module._modules, **parts}
        return forward(view, *args, **kwargs)

    method.__name__ = "method"  # where pickle finds it, in a `Scope`
    return method


@functools.cache
def _traced(kind: Any) -> type:
    """The class of the stand-in for a module where a compiler traces its forward."""

    def find(self: Any, name: str) -> Any:
        module, parts = self._view
        return parts[name] if name in parts else getattr(module, name)

    return type(kind.__name__, (kind,), {"__getattr__": find})


class _Product:
    """The outputs of a group in one call."""

    def __init__(self, group: LinearGroup) -> None:
        self.group, self.x = group, None
        self.outputs: list[Tensor | None] = []

    def take(self, index: int, x: Tensor) -> Tensor:
        """What one layer makes of x; the first to ask computes all, and each gets what was computed once."""
        if self.x is None:
            self.x, self.outputs = x, [*self.group.shared(x)]
        found = self.outputs[index] if self.x is x else None
        if found is None:
            return self.group.alone(index, x)
        self.outputs[index] = None
        return found


class _Part:
    """One layer in one call."""

    def __init__(self, product: _Product, member: Member) -> None:
        self.product, self.member = product, member

    def __call__(self, x: Tensor) -> Tensor:
        return self.product.take(self.member.index, x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.member, name)


def other_inputs(forward: Callable[..., Any]) -> list[tuple[int, str]]:
    """Places, behind the module, and names of arguments that could be another tensor for the layers to read."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [*inspect.signature(forward).parameters.values()][1:]
    return [
        (place, each.name)
        for place, each in enumerate(parameters)
        if place > 0 and each.kind not in kinds and not any(part in each.name for part in HARMLESS)
    ]


def why_apart(module: torch.nn.Module, names: Sequence[str]) -> str | None:
    """Why the layers of a group compute one by one, or None: they share a product."""
    modules = module._modules
    group = getattr(modules.get(names[0]), "group", None)
    if type(group) is not LinearGroup:
        return f"{names[0]} was replaced by {type(modules.get(names[0])).__name__}"
    if has_hooks(group):
        return "its group has hooks, or there are hooks on all modules"
    for index, name in enumerate(names):
        member = modules.get(name)
        if type(member) is not Member or member.shared[0] is not group or member.index != index:
            return f"{name} was replaced by {type(member).__name__}"
        if any(map(member.__dict__.get, SPECIAL)):
            return f"{name} has hooks or a forward of its own"
    return None


def _parts(module: torch.nn.Module, groups: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Stand-ins for the layers in one call, by name."""
    parts, modules = {}, module._modules
    for names in groups:
        if why_apart(module, names) is None:
            product = _Product(modules[names[0]].group)  # type: ignore[union-attr, arg-type]
            for name in names:
                parts[name] = _Part(product, modules[name])  # type: ignore[arg-type]
    return parts


def _has_other(others: Sequence[tuple[int, str]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    count = len(args)
    return any(isinstance(args[i] if i < count else kwargs.get(name), Tensor) for i, name in others)
