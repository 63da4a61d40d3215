"""Attention of Hugging Face's transformers: Gemma 2's computed here, and the masks of the others under torch.compile.

Gemma 2 caps its scores, which PyTorch's attention cannot do. transformers computes the cap with `eager`, by matrices of
all scores; `sdpa`, which its older versions choose by themselves, leaves it out. Models that need no more than a mask
or a window keep PyTorch's attention. Under torch.compile transformers gives it a matrix of bools where a flag says the
same, with which PyTorch takes two to four times as long: `keep_flags` keeps the flag.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor

from ._core.patching import Patched
from .functional import flash_attention, flash_attention_masked
from .levels import LADDER
from .masks import visible

NAME = "kernel_pytorch_attention"
"""What `_attn_implementation` of a patched Gemma 2's configuration is; before, and afterwards, it is "eager".

By "flash" in a name transformers knows FlashAttention's own implementations.
"""


class _Marks:
    """An attribute for each configuration whose models keep their flags.

    Dynamo guards on each alone, so that patching a model does not compile others again. transformers would save an
    attribute of the configuration itself.
    """


KEPT = _Marks()
ATTRIBUTE = "_kernel_pytorch_keeps_flags"
GEMMA2 = "transformers.models.gemma2.modeling_gemma2"


def patch(model: torch.nn.Module, report: Patched) -> None:
    """Choose `flash_attention` in the configuration of every Gemma 2 whose attention is `eager`; keep flags of `sdpa`.

    Args:
        model: whose modules are looked through, itself among them.
        report: takes what was replaced, by the path of an attention, and why the rest was not.
    """
    kept = {id(config) for config in keep_flags(model)}
    for path, module in model.named_modules():
        if path in report.left and id(getattr(module, "config", None)) in kept:
            report.left[path] += "; under torch.compile it keeps its causal flag"
    for path, owner in _owners(model).items():
        config = owner.config
        if config.attn_logit_softcapping is None:
            continue
        attentions = {
            name: module for name, module in owner.named_modules(prefix=path)
            if isinstance(module, sys.modules[GEMMA2].Gemma2Attention)
        }  # fmt: skip
        for name in attentions:  # what follows says more of them
            report.left.pop(name, None)
        if config._attn_implementation not in ("eager", NAME):
            report.left[path] = (
                f"its attention is {config._attn_implementation!r}; only 'eager' is replaced: 'sdpa' leaves out the "
                "soft cap of its scores, and model.set_attn_implementation('eager') brings it back"
            )
            continue
        if config.output_attentions or any(module.config is not config for module in attentions.values()):
            report.left[path] = (
                "its configuration asks for output_attentions, which transformers allows to 'eager' alone"
                if config.output_attentions else "an attention in it has a configuration of its own"
            )  # fmt: skip
            continue
        _register()
        by = "flash_attention" if config._attn_implementation == "eager" else "flash-attn-triton, patched before"
        config._attn_implementation = NAME
        report.replaced.update(dict.fromkeys(attentions, by))


def unpatch(model: torch.nn.Module) -> None:
    """Undo `patch`."""
    for owner in _owners(model).values():
        if owner.config._attn_implementation == NAME:
            owner.config._attn_implementation = "eager"
    drop_flags(model)


def _owners(model: torch.nn.Module) -> dict[str, Any]:
    """By path, the outermost modules that have a configuration of Gemma 2; there are none before it was imported."""
    found: dict[str, Any] = {}
    if GEMMA2 in sys.modules:
        for path, module in model.named_modules():
            is_one = isinstance(module, sys.modules[GEMMA2].Gemma2PreTrainedModel)
            if is_one and all(module.config is not owner.config for owner in found.values()):
                found[path] = module
    return found


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def keep_flags(model: torch.nn.Module) -> list[Any]:
    """Let attention of transformers that is `sdpa` keep the flags of its masks under torch.compile.

    Returns:
        The configurations that say so.
    """
    found = _sdpa_models(model)
    for module in found:
        setattr(module, ATTRIBUTE, _Kept(module.config))
    return [module.config for module in found]


def drop_flags(model: torch.nn.Module) -> None:
    """Undo `keep_flags`."""
    for module in model.modules():
        kept = vars(module).pop(ATTRIBUTE, None)
        if kept is not None:
            KEPT.__dict__.pop(_mark(kept.config), None)


class _Kept:
    """Marks a configuration for as long as it lives; one in a module marks the configurations of its copies too."""

    def __init__(self, config: Any) -> None:
        _register_flags()
        self.config = config
        setattr(KEPT, _mark(config), True)
        weakref.finalize(config, KEPT.__dict__.pop, _mark(config), None)

    def __reduce__(self) -> tuple[Any, ...]:  # for copies and pickles: a configuration is marked by its id
        return _Kept, (self.config,)


def _mark(config: Any) -> str:
    return f"configuration_{id(config)}"


def _sdpa_models(model: torch.nn.Module) -> list[Any]:
    """A module for each configuration in a model of transformers that chooses PyTorch's attention."""
    if "transformers" not in sys.modules:
        return []
    found = {id(module.config): module for module in reversed([*model.modules()]) if hasattr(module, "config")}
    return [m for m in found.values() if getattr(m.config, "_attn_implementation", None) == "sdpa"]


def _register_flags() -> None:
    """Be asked for the masks of `sdpa`, once; models that are not patched get what was registered before."""
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    before = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    if hasattr(before, "keeps_flags"):
        return

    def flag_or_mask(*args: Any, **given: Any) -> Any:
        if before is sdpa_mask and not args and "config" in given and hasattr(KEPT, _mark(given["config"])):
            return _flag_or_mask(given)
        return before(*args, **given)

    flag_or_mask.keeps_flags = True  # type: ignore[attr-defined]
    AttentionMaskInterface.register("sdpa", flag_or_mask)


def mask(**given: Any) -> Tensor | None:
    """What transformers' `sdpa_mask` gives, a tensor of bools; None where causal and the window say it all."""
    bidirectional = given.pop("allow_is_bidirectional_skip", False)
    # There the window alone is a reason for a mask. As many keys as queries: nothing is in a cache.
    if given.get("q_length") == given["kv_length"] and not bidirectional:
        given["local_size"] = None
    return _flag_or_mask(given)  # without that argument it is never None but for what is causal


def _flag_or_mask(given: dict[str, Any]) -> Tensor | None:
    """None under torch.compile too where `sdpa_mask` gives it eagerly, and a flag says all of the mask.

    transformers 5.24 does so by itself with torch 2.13; before, it makes a mask of every flag while Dynamo traces. It
    stays a mask where padding or packed sequences may be given, whose values Dynamo cannot read, where a cache has
    tokens or room, and where the window is shorter than the sequence.
    """
    from transformers.masking_utils import sdpa_mask

    if torch.compiler.is_dynamo_compiling() and given.get("attention_mask") is None:
        keys, window = given["kv_length"], given.get("local_size")
        skips = given.get("allow_is_causal_skip", True) or given.get("allow_is_bidirectional_skip", False)
        if skips and given.get("q_length") == keys and (window is None or keys < window):
            return None
    return sdpa_mask(**given)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    *,
    level: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers' `eager_attention_forward` of Gemma 2 does, which computes what has no fast level here.

    That is everything where the Triton kernels do not run; and dropout, weights that are wanted, and one query at a
    time. As there, `module.is_causal` is not asked: the mask says it.

    Args:
        module: the `Gemma2Attention`.
        query: `(B, H, Sq, D)`.
        key: `(B, Hkv, Sk, D)`.
        value: `(B, Hkv, Sk, D)`.
        attention_mask: `(B, 1, Sq, Sk)`, bools or numbers to add, window included; None for causal and the window.
        dropout: probability with which a weight becomes zero.
        scaling: of the scores.
        softcap: of the scores.
        sliding_window: how many keys a query sees, its own among them; None for all.
        level: as in `flash_attention`; one that was asked for computes everything.
        **kwargs: what else the model hands on.

    Returns:
        `(B, Sq, H, D)`; None, or the weights.
    """
    queries = query.shape[2]
    window = None if sliding_window is None else (sliding_window - 1, -1)
    wants_weights = kwargs.get("output_attentions", module.config.output_attentions)
    if level is None and (
        dropout > 0.0
        or wants_weights
        or queries == 1
        or LADDER.chosen("flash_attention", None, value, features=["softcap"]) == "reference"
    ):
        added = _added(attention_mask, query, key.shape[2], window)
        return _eager(module, query, key, value, added, dropout=dropout, scaling=scaling, softcap=softcap)
    query, key = query.to(value.dtype), key.to(value.dtype)  # autocast leaves float32 what was rotated
    if attention_mask is None:
        if queries > 1:  # a static cache has room behind the keys that are there
            key, value = key[:, :, :queries], value[:, :, :queries]
        o = flash_attention(query, key, value, causal=True, scale=scaling, window=window, softcap=softcap, level=level)
    else:
        o = flash_attention_masked(query, key, value, attention_mask, scale=scaling, softcap=softcap, level=level)
    return o.transpose(1, 2).contiguous(), None


def _eager(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor | None]:
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    return eager_attention_forward(*arguments, **keywords)


def _added(attention_mask: Tensor | None, query: Tensor, keys: int, window: tuple[int, int] | None) -> Tensor | None:
    """The mask as the class's own attention adds it to the scores."""
    queries = query.shape[2]
    if attention_mask is None and queries > 1:
        sees = visible(queries, queries, -1 if window is None else window[0], 0, query.device)
        attention_mask = torch.nn.functional.pad(sees, (0, keys - queries), value=False)
    if attention_mask is None or attention_mask.dtype != torch.bool:
        return attention_mask
    lowest = torch.finfo(query.dtype).min
    return torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
