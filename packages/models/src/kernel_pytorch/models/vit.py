"""Loads a ViT of transformers or of torchvision into a `VisionTransformer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .loading import activation_of, configuration, fill, joined, named, numbered

if TYPE_CHECKING:
    from .vision_transformer import VisionTransformer

NORMS = {"norm1": "layernorm_before", "norm2": "layernorm_after"}
QKV = tuple(f"attention.attention.{name}" for name in ("query", "key", "value"))
OLD = {"attention__out": "attention.output.dense", "mlp__up": "intermediate.dense", "mlp__down": "output.dense"}
NEW = {"attention__out": "attention.o_proj", "mlp__up": "mlp.fc1", "mlp__down": "mlp.fc2"}
LAYERS = {
    "layers.": named(attention__qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"), **NORMS, **NEW),
    "encoder.layer.": named(attention__qkv=QKV, **NORMS, **OLD),
}
"""Names of a block in transformers: those of version 5's modules, and those of files and of older versions."""

OUTSIDE = {
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
OLDER = {"mlp.linear_1.": "mlp.0.", "mlp.linear_2.": "mlp.3."}
"""Names of torchvision's feed-forward in older files, and the present ones."""


def load_transformers(
    cls: type[VisionTransformer], source: Any, state_dict: Mapping[str, Tensor] | None, **how: Any
) -> VisionTransformer:
    """See `VisionTransformer.from_transformers`."""
    config, state_dict = configuration(source, state_dict, "vit")
    if not config.get("qkv_bias", True):
        raise ValueError("config: qkv_bias is False; it must be True")
    how |= {"activation": activation_of(config, "gelu"), "norm_eps": config.get("layer_norm_eps", 1e-12)}
    prefix = "vit." if any(name.startswith("vit.") for name in state_dict) else ""
    home = next((b for b in LAYERS if any(name.startswith(prefix + b) for name in state_dict)), "layers.")
    names = {ours: tuple(prefix + name for name in theirs) for ours, theirs in OUTSIDE.items()}
    names |= numbered("blocks.", prefix + home, LAYERS[home], config["num_hidden_layers"])
    if "classifier.weight" in state_dict:
        names |= named(head="classifier")
    state = joined({n: t for n, t in state_dict.items() if not n.startswith(f"{prefix}pooler.")}, names)
    return _made(cls, state, config["image_size"], config["num_hidden_layers"], config["num_attention_heads"], **how)


def load_torchvision(
    cls: type[VisionTransformer], state_dict: Mapping[str, Tensor], num_heads: int, **how: Any
) -> VisionTransformer:
    """See `VisionTransformer.from_torchvision`."""
    given = dict(state_dict)
    for old, new in OLDER.items():
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
