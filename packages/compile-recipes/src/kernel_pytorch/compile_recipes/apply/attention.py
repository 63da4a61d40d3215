"""Attention of transformers, by the seam that it offers: another implementation by name, per model."""

from __future__ import annotations

from typing import Any

import torch

from .changes import Context, Done

FLAG = "kernel_pytorch_flag"
"""Name under which attention that keeps its causal flag under `torch.compile` is registered."""


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
    """The causal flag under `torch.compile`, where transformers would make a mask of it."""
    if not any(c._attn_implementation == "sdpa" for c in configs_of(model).values()):
        return "it is no model of transformers whose attention is 'sdpa'"
    if not any(getattr(m, "is_causal", False) for m in model.modules()):
        return "its attention is not causal"
    register_flag()
    return switch(model, {"sdpa"}, FLAG)


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


def register_flag() -> None:
    """Let transformers know attention that gets no mask where the causal flag says all of it.

    The flag says all where there is no padding, no packed sequence, no window, and as many keys as queries.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    def mask(*args: Any, **kwargs: Any) -> Any:
        plain = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
        whole = kwargs.get("attention_mask") is None and kwargs.get("local_size") is None
        lengths = kwargs.get("q_length"), kwargs.get("kv_length")
        if not args and plain and whole and None not in lengths and lengths[0] == lengths[1]:
            return None
        return sdpa_mask(*args, **kwargs)

    AttentionInterface.register(FLAG, sdpa_attention_forward)
    AttentionMaskInterface.register(FLAG, mask)
