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

    Of `torch.nn.MultiheadAttention`: a query that sees no key gives the projection of zeros, and `is_causal` is obeyed
    without `attn_mask` too. What has no counterpart here goes to the class's own forward, call by call: weights that
    are wanted, dropout while training, nested tensors. A `torch.nn.TransformerEncoderLayer` in evaluation takes
    PyTorch's own way past its attention, and so past this.

    Of Gemma 2 in Hugging Face's transformers, where its attention is `eager`: the result is that of `eager`, which caps
    the scores. `sdpa`, which older versions of transformers choose by themselves, leaves the soft cap out and is not
    replaced: that would be another function. `model.set_attn_implementation("eager")` before this takes the cap back.
    Padding that sees no key gives zeros. Where the Triton kernels do not run, for one query at a time, for dropout and
    for weights that are wanted, `eager` computes. The model's configuration names the attention, so a copy is patched
    too, and one that was pickled has to be patched again.

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
    """Of the stock class itself it is known what it computes; of others it is not."""
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
