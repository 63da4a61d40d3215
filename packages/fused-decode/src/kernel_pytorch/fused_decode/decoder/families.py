"""Reads a `Plan` from a causal model of transformers, by the parts that its modules have.

Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, Phi-3, OLMo 2, SmolLM3 and what is built like them. A trial shows whether
the parts compute what their names say: see `miniature.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_decode.arguments import ACTIVATIONS
from kernel_pytorch.fused_decode.levels.reference import activated

from .plan import Attention, Layer, Linear, Norm, Plan

EPS = ("variance_epsilon", "eps", "epsilon")
"""Attributes in which norms keep what is added to the mean square."""


class Refused(TypeError):
    """A model that the decoder does not compute, with the reason."""


@dataclass(frozen=True)
class Reading:
    """What names and attributes leave open, and a trial decides.

    Attributes:
        windows: which layers have the window of the configuration: those whose type says so, "all" or "none".
        attention_cap: whether attention caps its scores where it has an attribute for that; `sdpa` leaves it out.
        logits_cap: whether the logits are capped where the configuration has a number for that.
    """

    windows: str = "typed"
    attention_cap: bool = True
    logits_cap: bool = True


def read(model: torch.nn.Module, reading: Reading) -> Plan:
    """What a model computes, with its Parameters.

    Raises:
        Refused: a part is missing, or is of another kind than those that the decoder computes.
    """
    base = _part(model, "model", "its decoder")
    layers = _part(base, "layers", "its layers")
    embedding, head = _part(base, "embed_tokens", "its embedding"), _part(model, "lm_head", "its head")
    cap = _config(model, "final_logit_softcapping")
    return Plan(
        table=embedding.weight,
        scale=_scale(embedding),
        layers=tuple(_layer(model, index, layer, reading) for index, layer in enumerate(layers)),
        norm=_norm(_part(base, "norm", "its last norm")),
        head=_linear(head, "lm_head"),
        softcap=None if cap is None or not reading.logits_cap else float(cap),
    )


def _layer(model: Any, index: int, layer: torch.nn.Module, reading: Reading) -> Layer:
    try:
        names = [name for name, child in layer.named_children() if child._parameters and "norm" in name]
        first, second = ("input_layernorm", "post_attention_layernorm")
        roles: tuple[str | None, ...]
        if {"pre_feedforward_layernorm", "post_feedforward_layernorm"} <= {*names}:  # Gemma 2 and 3
            roles = (first, second, "pre_feedforward_layernorm", "post_feedforward_layernorm")
        elif "post_feedforward_layernorm" in names:  # OLMo 2
            roles = (None, second, None, "post_feedforward_layernorm")
        else:
            roles = (first, None, second, None)
        if {*names} != {role for role in roles if role is not None}:
            raise Refused(f"its norms are {', '.join(names) or 'none'}, which is no arrangement that is computed here")
        norms = [None if role is None else _norm(_part(layer, role, "a norm")) for role in roles]
        unit = _part(layer, "mlp", "its gated unit")
        act = next((getattr(unit, name) for name in ("act_fn", "activation_fn") if hasattr(unit, name)), None)
        return Layer(
            attention=_attention(model, index, _part(layer, "self_attn", "its attention"), reading),
            gate_up=_joint(unit, ("gate_proj", "up_proj"), "gate_up_proj"),
            down=_linear(_part(unit, "down_proj", "its last product"), "down_proj"),
            activation=_activation(act),
            attention_norm=norms[0], attention_post=norms[1], unit_norm=norms[2], unit_post=norms[3],
        )  # fmt: skip
    except Refused as error:
        raise Refused(f"layer {index}: {error}") from None


def _attention(model: Any, index: int, module: Any, reading: Reading) -> Attention:
    qkv = _joint(module, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    head_dim = module.head_dim
    sizes = [weight.shape[0] for weight in qkv.weight]
    heads, kv_heads = _config(model, "num_attention_heads"), _config(model, "num_key_value_heads")
    if sizes not in ([(heads + 2 * kv_heads) * head_dim], [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]):
        raise Refused(
            f"rows of queries, keys and values are {sizes}; with {heads} heads, {kv_heads} for keys and values, of "
            f"{head_dim} columns they must be {heads * head_dim}, {kv_heads * head_dim} and {kv_heads * head_dim}"
        )
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    q_norm, k_norm = (None if norm is None else _norm(norm) for norm in norms)
    wide = {None if norm is None else norm.weight.numel() for norm in (q_norm, k_norm)}
    if wide not in ({None}, {head_dim}, {heads * head_dim, kv_heads * head_dim}):
        raise Refused(f"norms of queries and keys have {wide} columns; allowed are those of a head or of all heads")
    cap = getattr(module, "attn_logit_softcapping", None)
    types = _config(model, "layer_types")
    windowed = {"typed": types is not None and types[index] == "sliding_attention", "all": True, "none": False}
    window = _config(model, "sliding_window") if windowed[reading.windows] else None
    return Attention(
        qkv=qkv,
        output=_linear(_part(module, "o_proj", "its last product"), "o_proj"),
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=float(module.scaling),
        softcap=None if cap is None or not reading.attention_cap else float(cap),
        window=None if window is None else int(window),
        rotary=(types[index] if types is not None else "") if getattr(module, "use_rope", True) else None,
        q_norm=q_norm, k_norm=k_norm, per_head=wide == {head_dim},
    )  # fmt: skip


def _part(module: Any, name: str, what: str) -> Any:
    part = module._modules.get(name)
    if part is None:
        raise Refused(f"{type(module).__name__} has no `{name}`, {what}")
    return part


def _config(model: Any, name: str) -> Any:
    return getattr(model.config, name, None)


def _linear(module: torch.nn.Module, name: str) -> Linear:
    if type(module) is not torch.nn.Linear:
        advice = "unfuse it first" if type(module).__module__.startswith("kernel_pytorch.") else (
            "merge adapters into the model, or load it without quantisation"
        )  # fmt: skip
        raise Refused(f"{name} is a {type(module).__module__}.{type(module).__name__}, not a torch.nn.Linear; {advice}")
    return Linear(module.weight, module.bias)


def _joint(module: torch.nn.Module, apart: tuple[str, ...], together: str) -> Linear:
    """The layers that are computed together, as tuples of their Parameters."""
    if together in module._modules:
        linears = [_linear(module._modules[together], together)]  # type: ignore[arg-type]
    else:
        linears = [_linear(_part(module, name, f"nor {together}"), name) for name in apart]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(linears)):
        raise Refused(f"some of {', '.join(apart)} have a bias and some have none")
    return Linear(tuple(linear.weight for linear in linears), tuple(biases) or None)


def _norm(module: torch.nn.Module) -> Norm:
    """Offset by a trial with a weight of zeros: what is left is 0, or the normed input."""
    weight = module._parameters.get("weight")
    eps = next((getattr(module, name) for name in EPS if isinstance(getattr(module, name, None), float)), None)
    if list(module._parameters) != ["weight"] or weight is None or weight.dim() != 1 or eps is None:
        raise Refused(f"{type(module).__name__} is no RMSNorm: it must have one weight (N,) and an eps that is a float")
    from .miniature import stand_in

    trial = stand_in(module, {id(weight): torch.zeros(weight.shape, dtype=torch.float32)})
    return Norm(weight, float(bool(trial(torch.ones(1, weight.numel(), dtype=torch.float32)).any())), eps)


def _scale(embedding: torch.nn.Module) -> float | None:
    """By a trial with a table of ones."""
    if not isinstance(embedding, torch.nn.Embedding) or embedding.max_norm is not None:
        raise Refused(
            f"its embedding is a {type(embedding).__name__}; it must be a torch.nn.Embedding without max_norm"
        )
    from .miniature import stand_in

    trial = stand_in(embedding, {id(embedding.weight): torch.ones(2, 1, dtype=torch.float64)})
    scale = float(trial(torch.ones(1, dtype=torch.int64)))
    return None if scale == 1.0 else scale


def _activation(module: Any) -> str:
    from .miniature import stand_in

    x = torch.linspace(-6.0, 6.0, 97, dtype=torch.float64)
    trial = stand_in(module, {}) if isinstance(module, torch.nn.Module) else module
    for name in ACTIVATIONS:
        if callable(trial) and torch.allclose(trial(x), activated(x, name), rtol=0.0, atol=1e-12):
            return name
    raise Refused(f"the activation of its unit is {type(module).__name__}; allowed are {', '.join(ACTIVATIONS)}")


def tables(model: Any, names: set[str], length: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Cosines and sines of all positions, from the model's own module: by type of layer, float32 `(length, half)`.

    Raises:
        Refused: they depend on the length of the text.
    """
    rotary, found = _part(model.model, "rotary_emb", "its rotary embedding"), {}
    device = model.model.embed_tokens.weight.device
    for name in names:
        kind, parameters = getattr(rotary, "rope_type", "default"), _config(model, "rope_parameters") or {}
        typed = isinstance(kind, dict)
        if isinstance(kind, dict):
            kind, parameters = kind[name], parameters[name]
        original = parameters.get("original_max_position_embeddings")
        if "dynamic" in kind:
            raise Refused(f"its rotary embedding is {kind!r}, whose angles depend on the length of the text")
        if kind == "longrope" and (original is None or length > original):
            raise Refused(f"its rotary embedding is 'longrope', whose angles change behind position {original}; "
                          f"max_length is {length} and must be at most {original}")  # fmt: skip
        x = torch.zeros(1, 1, 1, dtype=torch.float32, device=device)
        arguments = (x, torch.arange(length, device=device)[None], *([name] if typed else []))
        both = [table[0] for table in rotary(*arguments)]
        half = both[0].shape[-1] // 2
        if any(table.shape != (length, 2 * half) or not table[:, :half].equal(table[:, half:]) for table in both):
            raise Refused("its rotary embedding does not pair the two halves of a head")
        found[name] = (both[0][:, :half].contiguous(), both[1][:, :half].contiguous())
    return found
