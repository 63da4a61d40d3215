"""Loads a Llama of transformers into a `LanguageModel`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .loading import activation_of, configuration, joined, materialised

if TYPE_CHECKING:
    from .language_model import LanguageModel

ROPE_TYPES = ("default", "linear", "llama3")

LAYER = {
    "attention.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "attention.out.weight": ("self_attn.o_proj.weight",),
    "attention.out.bias": ("self_attn.o_proj.bias",),
    "mlp.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down.weight": ("mlp.down_proj.weight",),
    "norm1.weight": ("input_layernorm.weight",),
    "norm2.weight": ("post_attention_layernorm.weight",),
}
"""Our parameters of a block, and those of transformers whose rows they hold."""

OUTSIDE = {
    "embedding.weight": ("model.embed_tokens.weight",),
    "norm.weight": ("model.norm.weight",),
    "head.weight": ("lm_head.weight",),
}


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LanguageModel` that a configuration of transformers 4 or 5 stands for.

    Raises:
        ValueError: it asks for something that `LanguageModel` does not compute; the message has its name.
    """
    if config.get("mlp_bias"):
        raise ValueError("config: mlp_bias is True; False alone is computed here")
    theta, scaling = _rotation(config)
    return {
        "vocab_size": config["vocab_size"],
        "dim": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "hidden_dim": config["intermediate_size"],
        "max_position": config.get("max_position_embeddings", 2048),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": activation_of(config, "silu"),
        "attention_bias": bool(config.get("attention_bias")),
        "tie_embeddings": bool(config.get("tie_word_embeddings")),
    }


def _rotation(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from `rope_parameters` of version 5, or `rope_theta` and `rope_scaling` of version 4."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(found.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = found.pop("type", None)
    kind = found.pop("rope_type", kind) or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"config: rope_type is {kind!r}; allowed are {', '.join(ROPE_TYPES)}")
    partial = found.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(f"config: partial_rotary_factor is {partial}; 1.0 alone is computed here")
    return theta, None if kind == "default" else {"rope_type": kind, **found}


def renamed(state_dict: Mapping[str, Tensor], num_layers: int, tied: bool, biased: bool) -> dict[str, Tensor]:
    """Our state_dict, of one of `LlamaForCausalLM`.

    Args:
        state_dict: of that model.
        num_layers: how many layers it has.
        tied: whether the configuration ties the head to the embedding.
        biased: whether the projections of attention have biases.

    Raises:
        ValueError: tensors are missing or unknown, or the head differs from the embedding that it is tied to.
    """
    # Checkpoints of old versions hold the frequencies, which are computed.
    left = {name: tensor for name, tensor in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}
    names: dict[str, tuple[str, ...]] = dict(OUTSIDE)
    for index in range(num_layers):
        for ours, theirs in LAYER.items():
            if biased or not ours.endswith(".bias"):
                names[f"blocks.{index}.{ours}"] = tuple(f"model.layers.{index}.{name}" for name in theirs)
    if tied:
        head, embedding = left.pop("lm_head.weight", None), left.get("model.embed_tokens.weight")
        if head is not None and embedding is not None and not torch.equal(head, embedding):
            raise ValueError("lm_head.weight: it differs from model.embed_tokens.weight, which the config ties it to")
        del names["head.weight"]
    return joined(left, names)


def load_llama(
    cls: type[LanguageModel],
    source: Any,
    state_dict: Mapping[str, Tensor] | None,
    *,
    techniques: Iterable[str] | None,
    level: str | None,
) -> LanguageModel:
    """What `LanguageModel.from_llama` does; see there."""
    config, state_dict = configuration(source, state_dict, "llama")
    arguments = settings(config)
    how = arguments["num_layers"], arguments["tie_embeddings"], arguments["attention_bias"]
    state = renamed(state_dict, *how)
    with torch.device("meta"):
        model = cls(arguments.pop("vocab_size"), arguments.pop("dim"), **arguments, techniques=techniques, level=level)
    return materialised(model, state)
