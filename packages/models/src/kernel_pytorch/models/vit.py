"""Loads a ViT of transformers or of torchvision into a `VisionTransformer`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .loading import activation_of, configuration, joined, materialised

if TYPE_CHECKING:
    from .vision_transformer import VisionTransformer

Names = dict[str, tuple[str, ...]]


def _layers(**modules: str | tuple[str, ...]) -> Names:
    """Names of weights and biases, by our module (`__` for the dot) those of another library."""
    return {
        f"{ours.replace('__', '.')}.{kind}": tuple(
            f"{name}.{kind}" for name in ((theirs,) if isinstance(theirs, str) else theirs)
        )
        for ours, theirs in modules.items()
        for kind in ("weight", "bias")
    }


MODULES = {
    "layers.": _layers(
        norm1="layernorm_before",
        attention__qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        attention__out="attention.o_proj",
        norm2="layernorm_after",
        mlp__up="mlp.fc1",
        mlp__down="mlp.fc2",
    ),
    "encoder.layer.": _layers(
        norm1="layernorm_before",
        attention__qkv=tuple(f"attention.attention.{name}" for name in ("query", "key", "value")),
        attention__out="attention.output.dense",
        norm2="layernorm_after",
        mlp__up="intermediate.dense",
        mlp__down="output.dense",
    ),
}
"""Names of a block in transformers: those of version 5's modules, and those of files and of older versions."""

OUTSIDE = {
    "token": ("embeddings.cls_token",),
    "positions": ("embeddings.position_embeddings",),
    **_layers(patches="embeddings.patch_embeddings.projection", norm="layernorm"),
}

TORCHVISION = {
    "attention.qkv.weight": ("self_attention.in_proj_weight",),
    "attention.qkv.bias": ("self_attention.in_proj_bias",),
    **_layers(norm1="ln_1", attention__out="self_attention.out_proj", norm2="ln_2", mlp__up="mlp.0", mlp__down="mlp.3"),
}
TORCHVISION_OUTSIDE = {
    "token": ("class_token",),
    "positions": ("encoder.pos_embedding",),
    **_layers(patches="conv_proj", norm="encoder.ln", head="heads.head"),
}
OLDER = {"mlp.linear_1.": "mlp.0.", "mlp.linear_2.": "mlp.3."}
"""Names of torchvision's feed-forward in older files, and the present ones."""


def load_transformers(
    cls: type[VisionTransformer],
    source: Any,
    state_dict: Mapping[str, Tensor] | None,
    *,
    techniques: Iterable[str] | None,
    level: str | None,
) -> VisionTransformer:
    """What `VisionTransformer.from_transformers` does; see there."""
    config, state_dict = configuration(source, state_dict, "vit")
    if not config.get("qkv_bias", True):
        raise ValueError("config: qkv_bias is False; True alone is computed here")
    prefix = "vit." if any(name.startswith("vit.") for name in state_dict) else ""
    blocks = next((b for b in MODULES if any(name.startswith(prefix + b) for name in state_dict)), "layers.")
    names: Names = {ours: tuple(prefix + name for name in theirs) for ours, theirs in OUTSIDE.items()}
    for index in range(config["num_hidden_layers"]):
        for ours, theirs in MODULES[blocks].items():
            names[f"blocks.{index}.{ours}"] = tuple(f"{prefix}{blocks}{index}.{name}" for name in theirs)
    if "classifier.weight" in state_dict:
        names |= _layers(head="classifier")
    state = joined({n: t for n, t in state_dict.items() if not n.startswith(f"{prefix}pooler.")}, names)
    return _made(
        cls,
        state,
        image_size=config["image_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        activation=activation_of(config, "gelu"),
        norm_eps=config.get("layer_norm_eps", 1e-12),
        techniques=techniques,
        level=level,
    )


def load_torchvision(
    cls: type[VisionTransformer],
    state_dict: Mapping[str, Tensor],
    num_heads: int,
    *,
    techniques: Iterable[str] | None,
    level: str | None,
) -> VisionTransformer:
    """What `VisionTransformer.from_torchvision` does; see there."""
    given = dict(state_dict)
    for old, new in OLDER.items():
        given = {name.replace(old, new): tensor for name, tensor in given.items()}
    home = "encoder.layers.encoder_layer_"
    num_layers = len({name.removeprefix(home).split(".")[0] for name in given if name.startswith(home)})
    names: Names = dict(TORCHVISION_OUTSIDE)
    for index in range(num_layers):
        for ours, theirs in TORCHVISION.items():
            names[f"blocks.{index}.{ours}"] = tuple(f"{home}{index}.{name}" for name in theirs)
    state = joined(given, names)
    side = round((state["positions"].shape[-2] - 1) ** 0.5)
    size = side * state["patches.weight"].shape[-1]
    how = {"techniques": techniques, "level": level}
    return _made(cls, state, image_size=size, num_layers=num_layers, num_heads=num_heads, norm_eps=1e-6, **how)


def _made(
    cls: type[VisionTransformer], state: dict[str, Tensor], *, image_size: Any, num_layers: int, **arguments: Any
) -> VisionTransformer:
    """The model whose tensors these are; what they show of its sizes is not asked for again."""
    state["token"], state["positions"] = state["token"].flatten(), state["positions"].flatten(0, -2)
    patches, hidden = state["patches.weight"], state["blocks.0.mlp.up.weight"].shape[0] if num_layers else None
    with torch.device("meta"):
        model = cls(
            image_size if isinstance(image_size, int) else tuple(image_size),
            tuple(patches.shape[2:]),
            state["head.weight"].shape[0] if "head.weight" in state else 0,
            dim=patches.shape[0],
            in_channels=patches.shape[1],
            hidden_dim=hidden,
            num_layers=num_layers,
            **arguments,
        )
    return materialised(model, state)
