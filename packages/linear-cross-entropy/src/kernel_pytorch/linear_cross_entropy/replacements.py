"""What this package can stand in for: `patch(model)` puts it there in place, `unpatch(model)` takes it off."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._core import patching
from ._core.patching import Found, Patched
from ._core.stock import class_of, why_not_replaceable
from .functional import linear_cross_entropy

PACKAGE = "linear-cross-entropy"

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi3", "Olmo2")
CAUSAL = dict.fromkeys((f"{name}ForCausalLM" for name in FAMILIES), "CausalLMOutputWithPast") | {
    "GPT2LMHeadModel": "CausalLMOutputWithCrossAttentions"
}
"""Classes of Hugging Face's transformers whose loss is that of the next word under one linear head, with what their
forward returns."""
MASKED = {"BertForMaskedLM": "MaskedLMOutput"}
"""Those whose loss is that of hidden words, under a transform and one linear head."""
LOSS = "ForCausalLMLoss"
"""transformers' own loss of the next word; a model with another keeps its forward."""
OF_THE_LOSS = ("labels", "num_items_in_batch", "ignore_index", "logits_to_keep", "return_dict")
"""Keywords that the model without its head does not take."""


def patch(model: torch.nn.Module) -> Patched:
    """Let `linear_cross_entropy` compute the loss of a language model of Hugging Face's transformers, in place.

    While the model is training and has labels the loss comes from the hidden states, and `logits` of the output is
    None: they are never in memory (of the output as a tuple they are missing). Without labels, in evaluation, with
    another loss than transformers' own, and in bfloat16 on a CPU, where PyTorch's products are faster since they round
    the logits to 16 bits, the class's own forward runs. If all labels are ignored the loss is 0, where PyTorch's is
    NaN.

    Args:
        model: a model of transformers, before it is compiled, or what holds one.

    Returns:
        What was replaced, and why the rest was not.

    Raises:
        TypeError: `model` is no module, or is compiled or scripted.
    """
    return patching.patch(model, PACKAGE, [_find])


def unpatch(model: torch.nn.Module) -> None:
    """Undo `patch`: every module has the forward of its class again."""
    patching.unpatch(model, PACKAGE)


def _find(module: torch.nn.Module) -> Found | str | None:
    """A language model with a head of one linear layer."""
    name = class_of(module).__name__
    if name not in {**CAUSAL, **MASKED} or not class_of(module).__module__.startswith("transformers."):
        return _look_alike(module)
    head = module.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        return f"its head is {type(head).__name__}, no torch.nn.Linear"
    if reason := why_not_replaceable([head]):
        return reason
    return Found(_masked(module) if name in MASKED else _causal(module), "linear_cross_entropy, in training")


def _look_alike(module: torch.nn.Module) -> str | None:
    """Why a module with a head over the words of its embedding is left alone; None if it has none."""
    name = class_of(module).__name__
    if hasattr(module, "get_output_embeddings"):
        try:
            head = module.get_output_embeddings()
        except Exception:  # a class that has no such thing may say so by any error
            head = None
        named = name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration"))
        return f"it is not known what the head of {name} computes" if head is not None or named else None
    words = {tuple(each.weight.shape) for each in module.modules() if isinstance(each, torch.nn.Embedding)}
    heads = [
        n
        for n, each in module._modules.items()
        if isinstance(each, torch.nn.Linear) and tuple(each.weight.shape) in words
    ]
    if not heads:
        return None
    return (
        f"{name} is no class of transformers: compute its loss by linear_cross_entropy from what its {heads[-1]} reads"
    )


def _causal(module: torch.nn.Module) -> patching.Forward:
    stock, output = patching.forward_of_class(module), _output_of(module)

    @functools.wraps(stock)  # by its signature transformers tells what `generate` passes, which columns `Trainer` keeps
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if patching.is_compiled_inference() or not _is_ours(self, args, kwargs):
            return stock(self, *args, **kwargs)
        if kwargs.get("shift_labels") is not None or getattr(self.loss_function, "__name__", "") != LOSS:
            return stock(self, *args, **kwargs)
        outputs = _of_the_body(self, args, kwargs)
        labels = torch.nn.functional.pad(kwargs["labels"], (0, 1), value=kwargs.get("ignore_index", -100))[..., 1:]
        loss = _loss(self, outputs.last_hidden_state, self.get_output_embeddings(), labels, kwargs)
        return output(outputs, loss)

    return forward


def _masked(module: torch.nn.Module) -> patching.Forward:
    stock, output = patching.forward_of_class(module), _output_of(module)

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if patching.is_compiled_inference() or not _is_ours(self, args, kwargs):
            return stock(self, *args, **kwargs)
        if why_not_replaceable([self.cls, self.cls.predictions]):
            return stock(self, *args, **kwargs)
        outputs = _of_the_body(self, args, kwargs)
        head = self.cls.predictions
        hidden = head.transform(outputs.last_hidden_state)
        loss = _loss(self, hidden, head.decoder, kwargs["labels"], {})
        return output(outputs, loss if patching.is_autocast_enabled(hidden.device.type) else loss.to(hidden.dtype))

    return forward


def _is_ours(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call computes a training loss from arguments whose effect is known."""
    keep, head = kwargs.get("logits_to_keep", 0), model.get_output_embeddings()
    return (
        model.training
        and len(args) <= 1
        and kwargs.get("labels") is not None
        and isinstance(keep, int)
        and keep == 0
        and _is_dict_wanted(model, kwargs.get("return_dict"))
        and type(head) is torch.nn.Linear
        and why_not_replaceable([head]) is None
        and not _is_faster_rounded(head)
    )


def _is_dict_wanted(model: Any, given: bool | None) -> bool:
    """Whether the output is no tuple, according to the call or else to the configuration."""
    return bool(model.config.return_dict if given is None else given)


def _is_faster_rounded(head: torch.nn.Linear) -> bool:
    """Whether the product is computed in bfloat16 on a CPU, where PyTorch has no product with a float32 result."""
    if head.weight.device.type != "cpu":
        return False
    autocast = torch.is_autocast_enabled("cpu")
    return (torch.get_autocast_dtype("cpu") if autocast else head.weight.dtype) == torch.bfloat16


def _of_the_body(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the model without its head gives, no tuple, whatever the configuration says."""
    of_the_body = {name: value for name, value in kwargs.items() if name not in OF_THE_LOSS}
    return model.base_model(*args, **of_the_body, return_dict=True)


def _loss(model: Any, hidden: Tensor, head: torch.nn.Linear, labels: Tensor, given: dict[str, Any]) -> Tensor:
    """As transformers' own: the mean over the words that count, or their sum over the number that is given."""
    items = given.get("num_items_in_batch")
    loss = linear_cross_entropy(
        hidden, head.weight, labels.to(hidden.device), bias=head.bias, ignore_index=given.get("ignore_index", -100),
        softcap=getattr(model.config, "final_logit_softcapping", None), reduction="mean" if items is None else "sum",
    )  # fmt: skip
    return loss if items is None else loss / items


def _output_of(module: torch.nn.Module) -> Callable[[Any, Tensor], Any]:
    """What makes the output of the class's forward, without logits, of that of the model without its head."""
    kind = getattr(sys.modules["transformers.modeling_outputs"], {**CAUSAL, **MASKED}[class_of(module).__name__])
    names = [each.name for each in dataclasses.fields(kind) if each.name not in ("loss", "logits")]
    return lambda outputs, loss: kind(loss=loss, **{name: getattr(outputs, name, None) for name in names})
