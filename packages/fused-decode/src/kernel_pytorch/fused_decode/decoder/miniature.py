"""Whether the decoder computes what a model computes: tried on a miniature of it, with weights that are made up.

A miniature has the model's own classes, their forwards and attributes, and small tensors: other widths, vocabulary and
windows, the same heads and layers. Nothing of the model itself is called or changed, and its size does not matter.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_decode._core.patching import CALLED, forward_of_class
from kernel_pytorch.fused_decode._core.patching import _trials as trials
from kernel_pytorch.fused_decode._core.stock import HOOKS

from .families import Reading, Refused, read, tables
from .plan import Plan

WIDTH, UNIT, VOCABULARY, WINDOW, CAP, LENGTH = 16, 24, 32, 3, 0.7, 8
TOLERANCE = 2e-4
"""Part of the largest logit by which rounding may differ; another formula differs by more."""

READINGS = tuple(itertools.product(("typed", "all", "none"), (True, False), (True, False)))
"""What names and attributes leave open, most likely first."""


def recognise(model: torch.nn.Module) -> Plan:
    """Read what a model computes, and prove it on a miniature.

    Raises:
        Refused: the decoder computes something else, or a part of the model has no place in it.
    """
    with trials():
        try:
            plan = read(model, Reading())
        except (AttributeError, IndexError, KeyError, RuntimeError) as error:
            raise Refused(f"its parts are not those of a model that is computed here: {error}") from error
        _check_complete(model, plan)
        try:
            small, tokens = _miniature(model, plan), torch.arange(LENGTH)[None] * 5 % VOCABULARY
            expected, differences = small(input_ids=tokens, use_cache=False).logits[0], []
            for reading in itertools.starmap(Reading, READINGS):
                given = _logits(small, read(small, reading), tokens[0])
                differences.append(float((given - expected).abs().max() / expected.abs().max()))
                if differences[-1] < TOLERANCE:
                    return read(model, reading)
        except (Refused, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of many kinds: nothing is known of what the model's code does
            raise Refused(f"a miniature of it fails: {type(error).__name__}: {error}") from error
    raise Refused(
        f"its layers compute something else than the decoder does: logits of a miniature differ by "
        f"{min(differences):.1g} of the largest"
    )


def stand_in(
    module: torch.nn.Module, small: Mapping[int, Tensor], made: dict[int, Any] | None = None, configs: Any = None
) -> Any:
    """A module of the same class, with the forward of its class, no hooks, and other tensors.

    Args:
        module: which.
        small: by the id of a Parameter, what replaces it.
        made: stand-ins by the id of what they stand for, since modules may be shared.
        configs: makes a configuration of another one.
    """
    made = {} if made is None else made
    if id(module) in made:
        return made[id(module)]
    probe = made[id(module)] = copy.copy(module)
    own = probe.__dict__
    for name in HOOKS:
        own[name] = type(getattr(module, name))()
    own.pop("forward", None)
    own.pop("generate", None)
    own[CALLED] = MethodType(forward_of_class(module), probe)
    own["training"] = False
    own["_parameters"] = {
        name: None if p is None else torch.nn.Parameter(small[id(p)], requires_grad=False)
        for name, p in module._parameters.items()
    }  # fmt: skip
    own["_buffers"] = {name: None if b is None else b.detach().cpu().clone() for name, b in module._buffers.items()}
    own["_modules"] = {
        name: None if child is None else stand_in(child, small, made, configs)
        for name, child in module._modules.items()
    }
    if configs is not None and "config" in own:
        own["config"] = configs(own["config"])
    if isinstance(module, torch.nn.Embedding):
        own["padding_idx"] = None
    for name, value in (("sliding_window", WINDOW), ("attn_logit_softcapping", CAP)):
        if configs is not None and own.get(name) is not None:
            own[name] = value
    return probe


def _miniature(model: Any, plan: Plan) -> Any:
    generator, small = torch.Generator().manual_seed(0), {}

    def make(parameter: Tensor, *shape: int, size: float = 0.35) -> None:
        values = torch.randn(*shape, generator=generator, dtype=torch.float32)
        small[id(parameter)] = values * size if len(shape) > 1 else 1.0 + 0.2 * values

    make(plan.table, VOCABULARY, WIDTH, size=1.0)
    if plan.head.weight is not plan.table:
        make(plan.head.weight, VOCABULARY, WIDTH)
    if plan.head.bias is not None:
        make(plan.head.bias, VOCABULARY)
    for layer in plan.layers:
        attention = layer.attention
        wide = attention.heads * attention.head_dim
        for weight in attention.qkv.weight:
            make(weight, weight.shape[0], WIDTH)
        make(attention.output.weight, WIDTH, wide, size=wide**-0.5)
        for weight in layer.gate_up.weight:
            make(weight, UNIT * 2 // len(layer.gate_up.weight), WIDTH)
        make(layer.down.weight, WIDTH, UNIT)
        for bias in (*(attention.qkv.bias or ()), attention.q_norm, attention.k_norm):
            if bias is not None:
                tensor = getattr(bias, "weight", bias)
                make(tensor, *tensor.shape)
        for bias in layer.gate_up.bias or ():
            make(bias, UNIT * 2 // len(layer.gate_up.weight))
        norms = (layer.attention_norm, layer.attention_post, layer.unit_norm, layer.unit_post)
        tensors = [norm.weight for norm in norms if norm is not None]
        for tensor in (*tensors, attention.output.bias, layer.down.bias):
            if tensor is not None:
                make(tensor, WIDTH)
    make(plan.norm.weight, WIDTH)
    configs: dict[int, Any] = {}

    def config_of(config: Any) -> Any:
        if id(config) not in configs:
            other = configs[id(config)] = copy.deepcopy(config)
            for name, value in (("sliding_window", WINDOW), ("final_logit_softcapping", CAP)):
                if getattr(other, name, None) is not None:
                    setattr(other, name, value)
            rope, key = getattr(other, "rope_parameters", None) or {}, "original_max_position_embeddings"
            for each in (rope, *rope.values()):  # some models have one for each type of layer
                if isinstance(each, dict) and key in each and each.get("rope_type") != "longrope":  # see `tables`
                    each[key] = LENGTH // 2  # a model may scale queries from there on
            other.pad_token_id = None
            if other._attn_implementation not in ("eager", "sdpa"):
                other._attn_implementation = "eager"
        return configs[id(config)]

    return stand_in(model, small, configs=config_of)


def _logits(model: Any, plan: Plan, tokens: Tensor) -> Tensor:
    """What the decoder's step makes of these tokens, one after the other, from an empty cache."""
    from . import plain
    from .cache import Caches
    from .step import Step

    plan = plan.joined(lambda parts: torch.cat([part.detach() for part in parts]))
    names = plan.rotaries
    step = Step(plan, Caches(plan, tables(model, names, LENGTH), 1, LENGTH), plain)
    rows = []
    for position, token in enumerate(tokens):
        step.tokens.copy_(token)
        step.caches.lengths.fill_(position)
        rows.append(step.logits()[0].clone())
    return torch.stack(rows)


def _check_complete(model: torch.nn.Module, plan: Plan) -> None:
    """Raise Refused unless each Parameter has its one place in the plan, but for a head that is tied."""
    places = [id(parameter) for parameter in plan.parameters()]
    tied = plan.head.weight is plan.table
    if len({*places}) != len(places) - tied:
        raise Refused("layers of it share a Parameter, which joined weights would part")
    others = [name for name, parameter in model.named_parameters() if id(parameter) not in places]
    if others:
        raise Refused(
            f"{', '.join(others[:3])}{', ...' if len(others) > 3 else ''} have no place in what is computed here"
        )
