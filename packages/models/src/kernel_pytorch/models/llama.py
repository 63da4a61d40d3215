"""Loads a Llama of transformers into a `LanguageModel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .loading import activation_of, configuration, fill, joined, named, numbered

if TYPE_CHECKING:
    from .language_model import LanguageModel

ROPE_TYPES = ("default", "linear", "llama3")

ATTENTION = {
    "attention__qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention__out": "self_attn.o_proj",
}
MLP = {"mlp__gate_up": ("mlp.gate_proj", "mlp.up_proj"), "mlp__down": "mlp.down_proj"}
NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
LAYER = named(("weight",), **ATTENTION, **MLP, **NORMS)
"""Our parameters of a block, and those of transformers whose rows they hold."""
BIASES = named(("bias",), **ATTENTION)
OUTSIDE = named(("weight",), embedding="model.embed_tokens", norm="model.norm")


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LanguageModel` for a configuration of transformers 4 or 5.

    Raises:
        ValueError: it asks for something that `LanguageModel` does not compute; the message has its name.
    """
    if config.get("mlp_bias"):
        raise ValueError("config: mlp_bias is True; it must be False")
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
        raise ValueError(f"config: partial_rotary_factor is {partial}; it must be 1.0")
    return theta, None if kind == "default" else {"rope_type": kind, **found}


def load_llama(
    cls: type[LanguageModel], source: Any, state_dict: Mapping[str, Tensor] | None, **how: Any
) -> LanguageModel:
    """See `LanguageModel.from_llama`."""
    config, state_dict = configuration(source, state_dict, "llama")
    arguments = settings(config)
    # Checkpoints of old versions hold the frequencies, which are computed.
    left = {name: tensor for name, tensor in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}
    layer = LAYER | (BIASES if arguments["attention_bias"] else {})
    names = dict(OUTSIDE)
    if arguments["tie_embeddings"]:
        head, embedding = left.pop("lm_head.weight", None), left.get("model.embed_tokens.weight")
        if head is not None and embedding is not None and not torch.equal(head, embedding):
            raise ValueError("lm_head.weight: it differs from model.embed_tokens.weight, which the config ties it to")
    else:
        names["head.weight"] = ("lm_head.weight",)
    state = joined(left, names | numbered("blocks.", "model.layers.", layer, arguments["num_layers"]))
    with torch.device("meta"):
        model = cls(**arguments, **how)
    return fill(model, state)
