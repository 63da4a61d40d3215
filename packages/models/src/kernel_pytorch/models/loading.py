"""What the loaders of other libraries' models share: tensors under our names, and nothing missing or left over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Model = TypeVar("Model", bound=nn.Module)

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


def configuration(
    source: Any, state_dict: Mapping[str, Tensor] | None, kind: str
) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """The configuration of a model of transformers as a mapping, and its tensors.

    Args:
        source: the model, its configuration, or what its config.json holds.
        state_dict: of the model; may be None where source is a model.
        kind: the model_type that is wanted.

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
    found = given.get("model_type", getattr(config, "model_type", kind))  # in a configuration it is of the class
    if found != kind:
        raise ValueError(f"config: model_type is {found!r}; it must be {kind!r}")
    return given, state_dict


def activation_of(config: Mapping[str, Any], default: str) -> str:
    """Our name of a configuration's `hidden_act`.

    Raises:
        ValueError: it is not known.
    """
    name = config.get("hidden_act", default)
    if name not in ACTIVATIONS:
        raise ValueError(f"config: hidden_act is {name!r}; allowed are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def joined(
    state_dict: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]], optional: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """The tensors under our names, those of several names one below the other.

    Args:
        state_dict: of another library.
        names: by our name, theirs.
        optional: of our names, those whose tensors may be missing altogether.

    Raises:
        ValueError: tensors are missing, or are left over; the message has all of their names.
    """
    left, found, missing = dict(state_dict), {}, []
    for ours, theirs in names.items():
        absent = [name for name in theirs if name not in left]
        if len(absent) == len(theirs) and ours in optional:
            continue
        missing += absent
        parts = [left.pop(name) for name in theirs if name in left]
        if not absent:
            found[ours] = parts[0] if len(parts) == 1 else torch.cat(parts)
    problems = [f"missing are {', '.join(missing)}"] if missing else []
    problems += [f"unknown are {', '.join(left)}"] if left else []
    if problems:
        raise ValueError(f"state_dict: {'; '.join(problems)}")
    return found


def materialised(model: Model, state: Mapping[str, Tensor]) -> Model:
    """A model that was made on the meta device, with copies of these tensors, in their dtype and on their device.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape; the message has the names.
    """
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
    first = next(iter(state.values()))
    model.to(first.dtype).to_empty(device=first.device)
    model.load_state_dict(state)
    return model
