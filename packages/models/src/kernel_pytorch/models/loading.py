"""Shared by the loaders of other libraries' models: tensors under our names, nothing missing or left over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)
Names = dict[str, tuple[str, ...]]
"""By our name of a tensor, the names in another library of those whose rows it holds."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "quick_gelu": "quick_gelu",
}
"""Activations of transformers, and our names of them."""


def named(kinds: Iterable[str] = ("weight", "bias"), **modules: str | tuple[str, ...]) -> Names:
    """Names of the tensors of modules: by our module (`__` for the dot) that, or those, of another library."""
    parts = {ours.replace("__", "."): (t,) if isinstance(t, str) else t for ours, t in modules.items()}
    return {f"{ours}.{kind}": tuple(f"{t}.{kind}" for t in theirs) for ours, theirs in parts.items() for kind in kinds}


def numbered(ours: str, theirs: str, names: Names, count: int) -> Names:
    """The names of all layers, from those of one and the prefixes before the number of a layer."""
    layers = ((f"{ours}{i}.", f"{theirs}{i}.") for i in range(count))
    return {a + name: tuple(b + part for part in parts) for a, b in layers for name, parts in names.items()}


def configuration(
    source: Any, state_dict: Mapping[str, Tensor] | None, kind: str
) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """The configuration of a model of transformers as a mapping, and its tensors.

    Args:
        source: the model, its configuration, or the content of its config.json.
        state_dict: of the model; may be None where source is a model.
        kind: the expected model_type.

    Raises:
        TypeError: there are no tensors.
        ValueError: the model is of another type.
    """
    config = source
    if isinstance(source, nn.Module):
        config = source.config
        state_dict = source.state_dict() if state_dict is None else state_dict
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
    """Copy these tensors into a model; one on the meta device takes their dtype and device first.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape; the message has the names.
    """
    first = next(iter(state.values()))
    if next(model.parameters()).is_meta:
        model.to(first.dtype).to_empty(device=first.device)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"state_dict: {error}") from error
    return model
