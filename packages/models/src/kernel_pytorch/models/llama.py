"""Loads a Llama of transformers into a `LanguageModel`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .language_model import LanguageModel

ROPE_TYPES = ("default", "linear", "llama3")
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
"""Activations of transformers, and our names of them."""

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


def settings(config: Any) -> dict[str, Any]:
    """The arguments of `LanguageModel` that a configuration stands for.

    Args:
        config: a `LlamaConfig` of transformers 4 or 5, or the mapping that its config.json holds.

    Raises:
        ValueError: it asks for something that `LanguageModel` does not compute; the message has its name.
    """
    given = dict(config) if isinstance(config, Mapping) else vars(config)
    if given.get("model_type", getattr(config, "model_type", "llama")) != "llama":
        raise ValueError(f"config: model_type is {given.get('model_type', config.model_type)!r}; it must be 'llama'")
    for name in ("mlp_bias", "attention_dropout"):
        if given.get(name):
            raise ValueError(f"config: {name} is {given[name]}; {type(given[name])()} alone is computed here")
    activation = given.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"config: hidden_act is {activation!r}; allowed are {', '.join(ACTIVATIONS)}")
    theta, scaling = _rotation(given)
    return {
        "vocab_size": given["vocab_size"],
        "dim": given["hidden_size"],
        "num_layers": given["num_hidden_layers"],
        "num_heads": given["num_attention_heads"],
        "num_kv_heads": given.get("num_key_value_heads"),
        "head_dim": given.get("head_dim"),
        "hidden_dim": given["intermediate_size"],
        "max_position": given.get("max_position_embeddings", 2048),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": given.get("rms_norm_eps", 1e-6),
        "activation": ACTIVATIONS[activation],
        "attention_bias": bool(given.get("attention_bias")),
        "tie_embeddings": bool(given.get("tie_word_embeddings")),
    }


def _rotation(given: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from `rope_parameters` of version 5, or `rope_theta` and `rope_scaling` of version 4."""
    found = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
    theta = float(found.pop("rope_theta", None) or given.get("rope_theta") or 10000.0)
    kind = found.pop("type", None)
    kind = found.pop("rope_type", kind) or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"config: rope_type is {kind!r}; allowed are {', '.join(ROPE_TYPES)}")
    partial = found.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(f"config: partial_rotary_factor is {partial}; 1.0 alone is computed here")
    return theta, None if kind == "default" else {"rope_type": kind, **found}


def load_llama(
    cls: type[LanguageModel],
    source: Any,
    state_dict: Mapping[str, Tensor] | None,
    *,
    techniques: Iterable[str] | None,
    level: str | None,
) -> LanguageModel:
    """What `LanguageModel.from_llama` does; see there."""
    config = source
    if isinstance(source, nn.Module):
        config = source.config
        state_dict = source.state_dict() if state_dict is None else state_dict
    if state_dict is None:
        raise TypeError("state_dict: given None; with a configuration it must be the tensors of the model")
    arguments = settings(config)
    state = renamed(state_dict, arguments["num_layers"], arguments["tie_embeddings"])
    with torch.device("meta"):
        model = cls(arguments.pop("vocab_size"), arguments.pop("dim"), **arguments, techniques=techniques, level=level)
    check_shapes(model, state)
    model.to(state["embedding.weight"].dtype).to_empty(device=state["embedding.weight"].device)
    model.load_state_dict(state)
    return model


def renamed(state_dict: Mapping[str, Tensor], num_layers: int, tied: bool) -> dict[str, Tensor]:
    """Our state_dict, of one of transformers.

    Args:
        state_dict: of `LlamaForCausalLM`.
        num_layers: how many layers it has.
        tied: whether the configuration ties the head to the embedding.

    Raises:
        ValueError: tensors are missing or unknown, or the head differs from the embedding that it is tied to.
    """
    # Checkpoints of old versions hold the frequencies, which are computed.
    left = {name: tensor for name, tensor in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}
    names = dict(OUTSIDE)
    for index in range(num_layers):
        for ours, theirs in LAYER.items():
            names[f"blocks.{index}.{ours}"] = tuple(f"model.layers.{index}.{name}" for name in theirs)
    if tied:
        head, embedding = left.pop("lm_head.weight", None), left.get("model.embed_tokens.weight")
        if head is not None and embedding is not None and not torch.equal(head, embedding):
            raise ValueError("lm_head.weight: it differs from model.embed_tokens.weight, which the config ties it to")
        del names["head.weight"]
    return joined(left, names, optional=(".bias",))


def joined(
    state_dict: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]], optional: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """The tensors under our names, those of several names one below the other.

    Args:
        state_dict: of another library.
        names: by our name, theirs.
        optional: endings of our names whose tensors may be missing altogether.

    Raises:
        ValueError: tensors are missing, or are left over; the message has all of their names.
    """
    left, found, missing = dict(state_dict), {}, []
    for ours, theirs in names.items():
        parts = [left.pop(name, None) for name in theirs]
        if all(part is None for part in parts) and ours.endswith(optional):
            continue
        if absent := [name for name, part in zip(theirs, parts, strict=True) if part is None]:
            missing += absent
        else:
            found[ours] = parts[0] if len(parts) == 1 else torch.cat(parts)
    if missing or left:
        problems = [f"missing are {', '.join(missing)}"] * bool(missing) + [f"unknown are {', '.join(left)}"] * bool(
            left
        )
        raise ValueError(f"state_dict: {'; '.join(problems)}")
    return found


def check_shapes(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a state_dict has what a model needs, in its shapes."""
    wanted = model.state_dict()
    problems = [f"{name} is missing" for name in wanted if name not in state]
    problems += [f"{name} is not expected" for name in state if name not in wanted]
    problems += [
        f"{name} has shape {tuple(tensor.shape)}, not {tuple(wanted[name].shape)}"
        for name, tensor in state.items()
        if name in wanted and tensor.shape != wanted[name].shape
    ]
    if problems:
        raise ValueError(f"state_dict: {'; '.join(problems)}")
