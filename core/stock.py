"""Checks of PyTorch's own modules before a drop-in replaces them."""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch.nn.modules import module as _modules

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OWNER = "_kernel_pytorch_package"
"""Attribute of a function that is the forward of a patched module: the package that put it there, and the function
itself, since wrappers copy the attributes of what they wrap."""
HOLDS = "_kernel_pytorch_holds"
"""Attribute of an object whose method replaces the forward of a module and calls that of a patch: the module."""

BELOW = "_old_forward"
"""Attribute in which accelerate keeps the forward that its own, which moves weights, calls and brings back later."""

_has_global_hooks = _modules._has_any_global_hook  # a private name of PyTorch


def why_not_replaceable(modules: Iterable[torch.nn.Module]) -> str | None:
    """Explain what one of these modules does beyond its class and a drop-in would not; None if there is nothing."""
    for module in modules:
        name = type(module).__name__
        if has_hooks(module):
            return f"{name} has hooks, which a drop-in would not call"
        if has_foreign_forward(module):
            return f"{name} has a forward of its own, which a drop-in would not call"
        for parameter in ("weight", "bias"):
            value = getattr(module, parameter, None)
            if value is not None and not isinstance(value, torch.nn.Parameter):
                return f"the {parameter} of {name} is made of other tensors, and no torch.nn.Parameter"
    return None


def check_plain(modules: Iterable[torch.nn.Module]) -> None:
    """Raise TypeError with the reason if a drop-in cannot replace these modules."""
    reason = why_not_replaceable(modules)
    if reason is not None:
        raise TypeError(f"module: {reason}")


def is_untouched(*modules: torch.nn.Module) -> bool:
    """Whether these may be computed without a call: no hooks, and no forward but that of their class or of a patch.

    Cheap, since patched modules ask it of the children that they compute themselves, in each call.
    """
    for module in modules:
        own = module.__dict__
        if (
            own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
            or ("forward" in own and has_foreign_forward(module))
        ):  # fmt: skip
            return False
    return not _has_global_hooks()


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module runs hooks: its own, or those of all modules."""
    return any(map(module.__dict__.get, HOOKS)) or bool(_has_global_hooks())


def has_foreign_forward(module: torch.nn.Module) -> bool:
    """Whether something other than a patch replaced the forward of this very module, as offloading and adapters do."""
    forward = holder_of(module).__dict__.get("forward")
    if forward is None or owner_of(module) is not None:
        return False
    return getattr(forward, "__func__", None) is not type(module).forward  # as a module that was pickled has it


def owner_of(module: torch.nn.Module, attribute: str = "forward") -> str | None:
    """The package whose patch a module has, or None.

    Args:
        module: which.
        attribute: where its forward is kept: `BELOW` is where accelerate keeps the one that it wraps.
    """
    forward = holder_of(module).__dict__.get(attribute)
    if type(forward) is not MethodType or forward.__self__ is not module:
        return None
    owner, function = getattr(forward.__func__, OWNER, (None, None))
    return owner if function is forward.__func__ else None


def class_of(module: torch.nn.Module) -> type:
    """The class of a module as it was written: `fully_shard` puts a subclass there, with another name."""
    kind = type(module)
    return kind.__bases__[1] if kind.__bases__[0].__name__ == "FSDPModule" else kind


def holder_of(module: torch.nn.Module) -> Any:
    """What has the forward of a patch as an attribute: the module, or what runs it (`fuse` of qkv-fusion)."""
    holder = getattr(module.__dict__.get("forward"), "__self__", None)
    return holder if getattr(holder, HOLDS, None) is module else module
