"""What the linear modules can stand in for, and the way back."""

from __future__ import annotations

import sys
from typing import Any

import torch

from kernel_pytorch.fused_ln_act._core.stock import why_not_plain

from .module import MLP, GatedMLP, LinearAct

# Feed-forwards with gate_proj, up_proj and down_proj, by the module of Hugging Face's transformers that defines them.
TRANSFORMERS = {
    "transformers.models.llama.modeling_llama": "LlamaMLP",
    "transformers.models.mistral.modeling_mistral": "MistralMLP",
    "transformers.models.qwen2.modeling_qwen2": "Qwen2MLP",
    "transformers.models.qwen3.modeling_qwen3": "Qwen3MLP",
}


def build(module: torch.nn.Module) -> torch.nn.Module:
    """A drop-in for `torch.nn.Sequential` that shares its parameters: `MLP` or `LinearAct`."""
    assert isinstance(module, torch.nn.Sequential)
    return (LinearAct if len(module) == 2 else MLP).from_torch(module)


def restore(module: torch.nn.Module) -> torch.nn.Module:
    """The stock modules that `build` replaced, sharing the parameters."""
    assert isinstance(module, (LinearAct, MLP))
    return module.to_torch()


def applies(module: torch.nn.Module) -> str | None:
    """None, or why this very sequence is left alone."""
    if type(module) is not torch.nn.Sequential:
        return f"{type(module).__name__} may compute something else than torch.nn.Sequential"
    try:
        build(module)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def applies_gated(module: torch.nn.Module) -> str | None:
    """None, or why this very feed-forward is left alone."""
    if type(module).__name__ not in TRANSFORMERS.values():
        return f"{type(module).__name__} may compute something else than the class of transformers that it derives from"
    return why_not_plain(module.modules())


def replacements() -> list[dict[str, Any]]:
    """One entry for sequences, and one for each class of transformers that is imported already."""
    found: list[dict[str, Any]] = [
        {"stock": torch.nn.Sequential, "build": build, "restore": restore, "applies": applies}
    ]
    for name, stock in TRANSFORMERS.items():
        if name in sys.modules:
            entry = {"build": GatedMLP.from_torch, "restore": GatedMLP.to_torch, "applies": applies_gated}
            found.append({"stock": getattr(sys.modules[name], stock), **entry})
    return found
