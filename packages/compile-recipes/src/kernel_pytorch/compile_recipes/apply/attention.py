"""Attention of transformers, by the seam that it offers: another implementation by name, per model."""

from __future__ import annotations

from typing import Any

import torch

from .changes import Context, Done


def configs_of(model: torch.nn.Module) -> dict[int, Any]:
    """The configurations in a model that name an implementation of attention, each once."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation") and hasattr(module, "set_attn_implementation"):
            found[id(config)] = config
    return found


def use_sdpa(model: torch.nn.Module, context: Context) -> Done | str:
    """PyTorch's attention where a model of transformers has it written out by hand."""
    return switch(model, {"eager"}, "sdpa")


def keep_flag(model: torch.nn.Module, context: Context) -> Done | str:
    """The flags of masks under `torch.compile`, where transformers would make a mask of each."""
    try:
        from kernel_pytorch.flash_attn_triton.hugging_face import drop_flags, keep_flags
    except ImportError:
        return "flash-attn-triton, which keeps it, is not installed"
    count = len(keep_flags(model))
    if not count:
        return "it is no model of transformers whose attention is 'sdpa'"
    return Done(f"flags of attention kept under torch.compile in {count} configurations", lambda: drop_flags(model))


def switch(model: torch.nn.Module, old: set[str], new: str) -> Done | str:
    """Another implementation of attention for every configuration that has an old one."""
    configs = [(c, c._attn_implementation) for c in configs_of(model).values() if c._attn_implementation in old]
    if not configs:
        return f"it is no model of transformers whose attention is {' or '.join(sorted(old))}"
    roots = [m for m in model.modules() if hasattr(m, "set_attn_implementation")]
    try:
        for root in roots:
            root.set_attn_implementation(new)
    except (ValueError, ImportError) as error:
        for config, name in configs:
            config._attn_implementation = name
        return str(error)

    def undo() -> None:
        for config, name in configs:
            config._attn_implementation = name

    changed = sum(config._attn_implementation == new for config, _ in configs)
    if not changed:
        undo()
        return f"it does not take {new}"
    return Done(f"{new} for {configs[0][1]} in {changed} configurations", undo)
