"""What this package can stand in for: `patch(model)` puts it there in place, `unpatch(model)` takes it off."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import hugging_face
from ._core import patching
from ._core.patching import Found, Patched
from .module import attend

PACKAGE = "flash-attn-triton"


def patch(model: torch.nn.Module) -> Patched:
    """Let `flash_attention` compute every `torch.nn.MultiheadAttention` of a model, and Gemma 2's attention, in place.

    `torch.nn.MultiheadAttention`: a query that sees no key gives the projection of zeros, and `is_causal` applies
    without `attn_mask` too. Calls that have no counterpart here run the class's own forward: those that return weights,
    use dropout while training, or pass nested tensors. In evaluation `torch.nn.TransformerEncoderLayer` bypasses its
    attention with PyTorch's fast path, and so bypasses this.

    Gemma 2 in Hugging Face's transformers, where its attention is `eager`: the result is that of `eager`, which caps
    the scores. `sdpa`, the default of older versions of transformers, leaves the soft cap out and is not replaced: that
    would be another function. Call `model.set_attn_implementation("eager")` before this to restore the cap. Padding
    that sees no key gives zeros. `eager` computes where the Triton kernels do not run, for one query at a time, for
    dropout, and for calls that return weights. The model's configuration names the attention, so a copy is patched
    too, and a model that was pickled has to be patched again.

    Every other model of transformers is left to PyTorch's attention, which has all that it needs. Under torch.compile
    those whose attention is `sdpa` keep their causal flag, of which transformers makes a mask there, with which PyTorch
    takes two to four times as long; deep copies have to be patched for that too.

    Args:
        model: a model, or a part of one, before it is compiled.

    Returns:
        What was replaced, and why the rest was not.

    Raises:
        TypeError: `model` is no module, or is compiled or scripted.
    """
    report = patching.patch(model, PACKAGE, [_find])
    hugging_face.patch(model, report)
    return report


def unpatch(model: torch.nn.Module) -> None:
    """Undo `patch`: every module has the forward of its class again, and Gemma 2 its `eager` attention."""
    patching.unpatch(model, PACKAGE)
    hugging_face.unpatch(model)


def _find(module: torch.nn.Module) -> Found | str | None:
    """Match only the stock class itself: what other classes compute is not known."""
    if type(module) is not torch.nn.MultiheadAttention:
        return _look_alike(module)
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds a key of its own (add_bias_kv or add_zero_attn), which is left to the stock module"
    return Found(_forward, "flash_attention")


def _look_alike(module: torch.nn.Module) -> str | None:
    """Why a module that attends, by its class's name and its layers, is left alone; None if it is something else."""
    name = type(module).__name__
    if isinstance(module, torch.nn.MultiheadAttention):
        return f"its class is {name}, a subclass of torch.nn.MultiheadAttention, which may compute something else"
    if "Att" not in name or type(module).__module__.startswith(("torch.nn.", "kernel_pytorch.")):
        return None
    weights = [child._parameters.get("weight") for child in module.children()]
    if sum(weight is not None and weight.dim() == 2 for weight in weights) < 2:  # what holds an attention, or no layers
        return None
    return f"its class is {name}: of attention, torch.nn.MultiheadAttention and Gemma 2's `eager` one are replaced"


def _forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    def stock(*given: Any) -> tuple[Tensor, Tensor | None]:
        return torch.nn.MultiheadAttention.forward(self, *given)

    return attend(self, stock, None, *args, **kwargs)
