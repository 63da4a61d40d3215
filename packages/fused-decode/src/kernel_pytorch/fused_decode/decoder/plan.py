"""What a decoder computes: a description that is read from a model, with its weights, and run by `step.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Weight = Any
"""A Parameter, several that are to be joined along their rows, or the joined tensor."""


@dataclass(frozen=True)
class Norm:
    """`x * rsqrt(mean(x^2) + eps) * (offset + weight)`."""

    weight: Tensor
    offset: float
    eps: float


@dataclass(frozen=True)
class Linear:
    """A product, with or without bias."""

    weight: Weight
    bias: Weight = None


@dataclass(frozen=True)
class Attention:
    """Attention of one layer.

    Attributes:
        qkv: queries, keys and values, in this order of rows.
        output: what follows it.
        q_norm, k_norm: norms before the rotation: of each head if `per_head`, else of all heads together.
        window: how many keys a token sees, its own among them; None for all.
        rotary: which table of cosines and sines; None if nothing is rotated.
    """

    qkv: Linear
    output: Linear
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int | None
    rotary: str | None
    q_norm: Norm | None
    k_norm: Norm | None
    per_head: bool


@dataclass(frozen=True)
class Layer:
    """One layer: `x + post(attention(norm(x)))`, then the same of the gated unit; any norm may be missing."""

    attention: Attention
    gate_up: Linear
    down: Linear
    activation: str
    attention_norm: Norm | None
    attention_post: Norm | None
    unit_norm: Norm | None
    unit_post: Norm | None


@dataclass(frozen=True)
class Plan:
    """A whole model.

    Attributes:
        table: of embeddings, (vocabulary, width).
        scale: what the embeddings are multiplied with, or None.
        layers: from the first to the last.
        norm: in front of the head.
        head: the last product.
        softcap: of the logits, or None.
    """

    table: Tensor
    scale: float | None
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    softcap: float | None

    def joined(self, join: Callable[[tuple[torch.nn.Parameter, ...]], Tensor]) -> Plan:
        """The plan with one tensor for the weights of queries, keys and values, and one for gate and up.

        Args:
            join: makes one tensor of several Parameters.
        """

        def one(linear: Linear) -> Linear:
            return Linear(join(linear.weight), None if linear.bias is None else join(linear.bias))

        layers = []
        for layer in self.layers:
            attention = replace(layer.attention, qkv=one(layer.attention.qkv))
            layers.append(replace(layer, attention=attention, gate_up=one(layer.gate_up)))
        return replace(self, layers=tuple(layers))

    @property
    def rotaries(self) -> set[str]:
        """Names of the rotary embeddings of its layers."""
        return {layer.attention.rotary for layer in self.layers if layer.attention.rotary is not None}

    def parameters(self) -> Iterable[Tensor]:
        """All Parameters of a plan that is not joined."""
        norms: list[Norm | None] = [self.norm]
        yield self.table
        yield from _tensors(self.head)
        for layer in self.layers:
            attention = layer.attention
            norms += [attention.q_norm, attention.k_norm, layer.attention_norm, layer.attention_post]
            norms += [layer.unit_norm, layer.unit_post]
            for linear in (attention.qkv, attention.output, layer.gate_up, layer.down):
                yield from _tensors(linear)
        yield from (norm.weight for norm in norms if norm is not None)


def _tensors(linear: Linear) -> Iterable[Tensor]:
    for weight in (linear.weight, linear.bias):
        if isinstance(weight, tuple):
            yield from weight
        elif weight is not None:
            yield weight
