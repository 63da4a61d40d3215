"""Loads a Llama or ViT of transformers, and a ViT of torchvision, with no tensor missing or left over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .language_model import LanguageModel
    from .vision_transformer import VisionTransformer

State: TypeAlias = Mapping[str, Tensor] | None
Model = TypeVar("Model", bound=nn.Module)
Names = dict[str, tuple[str, ...]]
"""By our name of a tensor, the names in another library of those whose rows it holds."""

ACTIVATIONS = {name: name for name in ("silu", "gelu", "relu", "quick_gelu")}
ACTIVATIONS |= {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
"""Activations of transformers, and our names of them."""


def named(kinds: Iterable[str] = ("weight", "bias"), **modules: str | tuple[str, ...]) -> Names:
    """Names of the tensors of modules: by our module (`__` for the dot) that, or those, of another library."""
    parts = {ours.replace("__", "."): (t,) if isinstance(t, str) else t for ours, t in modules.items()}
    return {f"{ours}.{kind}": tuple(f"{t}.{kind}" for t in theirs) for ours, theirs in parts.items() for kind in kinds}


def numbered(ours: str, theirs: str, names: Names, count: int) -> Names:
    """The names of all layers, from those of one and the prefixes before the number of a layer."""
    layers = ((f"{ours}{i}.", f"{theirs}{i}.") for i in range(count))
    return {a + name: tuple(b + part for part in parts) for a, b in layers for name, parts in names.items()}


def configuration(source: Any, state_dict: State, kind: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """The configuration of a model of transformers as a mapping, and its tensors: see `LanguageModel.from_llama`."""
    config = source
    if isinstance(source, nn.Module):
        if not hasattr(source, "config"):
            raise TypeError(f"source: given {type(source).__name__}; it must be a model of transformers")
        config = source.config
        state_dict = source.state_dict() if state_dict is None else state_dict
    elif not isinstance(source, Mapping) and not hasattr(source, "__dict__"):
        raise TypeError(f"source: given {source!r}; it must be a model of transformers or its configuration")
    if state_dict is None:
        raise TypeError("state_dict: given None; with a configuration it must be the tensors of the model")
    given = dict(config) if isinstance(config, Mapping) else dict(vars(config))
    found = given.get("model_type", getattr(config, "model_type", kind))  # an attribute of the configuration's class
    if found != kind:
        raise ValueError(f"config: model_type is {found!r}; it must be {kind!r}")
    return given, state_dict


def activation_of(config: Mapping[str, Any], default: str) -> str:
    """Our name of a configuration's `hidden_act`; ValueError if it is unknown."""
    name = config.get("hidden_act", default)
    if name not in ACTIVATIONS:
        raise ValueError(f"config: hidden_act is {name!r}; allowed are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def joined(state_dict: Mapping[str, Tensor], names: Names) -> dict[str, Tensor]:
    """The tensors of another library under our names, those of several names concatenated by rows.

    Raises:
        ValueError: tensors are missing, or are left over; the message has all of their names.
    """
    left, wanted = dict(state_dict), [name for theirs in names.values() for name in theirs]
    missing = [name for name in wanted if name not in left]
    unknown = [name for name in left if name not in set(wanted)]
    problems = [f"missing are {', '.join(missing)}"] if missing else []
    problems += [f"unknown are {', '.join(unknown)}"] if unknown else []
    if problems:
        raise ValueError(f"state_dict: {'; '.join(problems)}")
    return {a: left[b[0]] if len(b) == 1 else torch.cat([left[part] for part in b]) for a, b in names.items()}


def fill(model: Model, state: Mapping[str, Tensor]) -> Model:
    """Copy these tensors into a model, on the meta device with their dtype and device; ValueError if shapes differ."""
    first = next(iter(state.values()))
    if next(model.parameters()).is_meta:
        model.to(first.dtype).to_empty(device=first.device)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"state_dict: {error}") from error
    return model


# Llama
ROPE_TYPES = ("default", "linear", "llama3")

LLAMA_ATTENTION: dict[str, Any] = {"attention__qkv": tuple(f"self_attn.{t}_proj" for t in "qkv")}
LLAMA_ATTENTION["attention__out"] = "self_attn.o_proj"
LLAMA_MLP: dict[str, Any] = {"mlp__gate_up": ("mlp.gate_proj", "mlp.up_proj"), "mlp__down": "mlp.down_proj"}
LLAMA_NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
LLAMA_LAYER = named(("weight",), **LLAMA_ATTENTION, **LLAMA_MLP, **LLAMA_NORMS)
"""Our parameters of a block, and those of transformers whose rows they hold."""
LLAMA_BIASES = named(("bias",), **LLAMA_ATTENTION)
LLAMA_OUTSIDE = named(("weight",), embedding="model.embed_tokens", norm="model.norm")


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `LanguageModel` for a configuration of transformers 4 or 5; ValueError for what it lacks."""
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


def load_llama(cls: type[LanguageModel], source: Any, state_dict: State, **how: Any) -> LanguageModel:
    """See `LanguageModel.from_llama`."""
    config, state_dict = configuration(source, state_dict, "llama")
    arguments = settings(config)
    # Checkpoints of old versions hold the frequencies, which are computed.
    left = {name: tensor for name, tensor in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}
    layer = LLAMA_LAYER | (LLAMA_BIASES if arguments["attention_bias"] else {})
    names = dict(LLAMA_OUTSIDE)
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


# Vision transformers
VIT_NORMS = {"norm1": "layernorm_before", "norm2": "layernorm_after"}
VIT_OLD: dict[str, Any] = {"attention__qkv": tuple(f"attention.attention.{t}" for t in ("query", "key", "value"))}
VIT_OLD |= {"attention__out": "attention.output.dense", "mlp__up": "intermediate.dense", "mlp__down": "output.dense"}
VIT_NEW: dict[str, Any] = {"attention__qkv": tuple(f"attention.{t}_proj" for t in "qkv")}
VIT_NEW |= {"attention__out": "attention.o_proj", "mlp__up": "mlp.fc1", "mlp__down": "mlp.fc2"}
VIT_LAYERS = {"layers.": named(**VIT_NEW, **VIT_NORMS), "encoder.layer.": named(**VIT_OLD, **VIT_NORMS)}
"""Names of a block in transformers: those of version 5's modules, and those of files and of older versions."""

VIT_OUTSIDE = {
    "token": ("embeddings.cls_token",),
    "positions": ("embeddings.position_embeddings",),
    **named(patches="embeddings.patch_embeddings.projection", norm="layernorm"),
}

TORCHVISION = {
    "attention.qkv.weight": ("self_attention.in_proj_weight",),
    "attention.qkv.bias": ("self_attention.in_proj_bias",),
    **named(norm1="ln_1", attention__out="self_attention.out_proj", norm2="ln_2", mlp__up="mlp.0", mlp__down="mlp.3"),
}
TORCHVISION_OUTSIDE = {
    "token": ("class_token",),
    "positions": ("encoder.pos_embedding",),
    **named(patches="conv_proj", norm="encoder.ln", head="heads.head"),
}
TORCHVISION_OLDER = {"mlp.linear_1.": "mlp.0.", "mlp.linear_2.": "mlp.3."}
"""Names of torchvision's feed-forward in older files, and the present ones."""


def load_vit(cls: type[VisionTransformer], source: Any, state_dict: State, **how: Any) -> VisionTransformer:
    """See `VisionTransformer.from_transformers`."""
    config, state_dict = configuration(source, state_dict, "vit")
    if not config.get("qkv_bias", True):
        raise ValueError("config: qkv_bias is False; it must be True")
    how |= {"activation": activation_of(config, "gelu"), "norm_eps": config.get("layer_norm_eps", 1e-12)}
    prefix = "vit." if any(name.startswith("vit.") for name in state_dict) else ""
    home = next((b for b in VIT_LAYERS if any(name.startswith(prefix + b) for name in state_dict)), "layers.")
    names = {ours: tuple(prefix + name for name in theirs) for ours, theirs in VIT_OUTSIDE.items()}
    names |= numbered("blocks.", prefix + home, VIT_LAYERS[home], config["num_hidden_layers"])
    if "classifier.weight" in state_dict:
        names |= named(head="classifier")
    state = joined({n: t for n, t in state_dict.items() if not n.startswith(f"{prefix}pooler.")}, names)
    return _made(cls, state, config["image_size"], config["num_hidden_layers"], config["num_attention_heads"], **how)


def load_torchvision(
    cls: type[VisionTransformer], state_dict: Mapping[str, Tensor], num_heads: int, **how: Any
) -> VisionTransformer:
    """See `VisionTransformer.from_torchvision`."""
    given = dict(state_dict)
    for old, new in TORCHVISION_OLDER.items():
        given = {name.replace(old, new): tensor for name, tensor in given.items()}
    home = "encoder.layers.encoder_layer_"
    num_layers = len({name.removeprefix(home).split(".")[0] for name in given if name.startswith(home)})
    state = joined(given, TORCHVISION_OUTSIDE | numbered("blocks.", home, TORCHVISION, num_layers))
    side = round((state["positions"].shape[-2] - 1) ** 0.5)
    size = side * state["patches.weight"].shape[-1]
    return _made(cls, state, size, num_layers, num_heads, norm_eps=1e-6, **how)


def _made(
    cls: type[VisionTransformer], state: dict[str, Tensor], size: Any, num_layers: int, num_heads: int, **how: Any
) -> VisionTransformer:
    """Make the model of these tensors, whose shapes give the other sizes."""
    state["token"], state["positions"] = state["token"].flatten(), state["positions"].flatten(0, -2)
    (dim, channels, *patch), classes = state["patches.weight"].shape, len(state.get("head.bias", ()))
    how |= {"dim": dim, "in_channels": channels, "num_layers": num_layers, "num_heads": num_heads}
    if num_layers:
        how["hidden_dim"] = state["blocks.0.mlp.up.weight"].shape[0]
    with torch.device("meta"):
        model = cls(size if isinstance(size, int) else tuple(size), tuple(patch), classes, **how)
    return fill(model, state)
