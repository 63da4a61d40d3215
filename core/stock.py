"""What is asked of PyTorch's own modules before a drop-in takes their place."""

from __future__ import annotations

from collections.abc import Iterable

import torch

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def why_not_plain(modules: Iterable[torch.nn.Module]) -> str | None:
    """What one of these does beyond what its class says, and a drop-in would not; None if it is nothing."""
    for module in modules:
        name = type(module).__name__
        if any(getattr(module, hooks) for hooks in HOOKS):
            return f"{name} has hooks, which a drop-in would not call"
        for parameter in ("weight", "bias"):
            value = getattr(module, parameter, None)
            if value is not None and not isinstance(value, torch.nn.Parameter):
                return f"the {parameter} of {name} is made of other tensors, and no torch.nn.Parameter"
    return None


def check_plain(modules: Iterable[torch.nn.Module]) -> None:
    """Raise TypeError with the reason if there is one."""
    reason = why_not_plain(modules)
    if reason is not None:
        raise TypeError(f"module: {reason}")
