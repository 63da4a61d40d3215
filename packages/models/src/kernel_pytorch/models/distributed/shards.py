"""Layers of which every rank has a part: parameters are DTensors, and what is computed with them are plain tensors.

A DTensor in `weight` lets optimizers, `fully_shard` and checkpoints know the whole. Kernels see the rank's own part, as
in a smaller model, so no operator needs a rule for DTensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from kernel_pytorch.models import techniques
from kernel_pytorch.models.block import Attention, FeedForward
from kernel_pytorch.models.techniques import local

from .loss import entering, first_row, leaving
from .sequence import gathered, replace_input, scattered

techniques.DIVIDED = (DTensor,)


class Divided(nn.Linear):
    """A linear layer of which a rank computes some outputs; or reads some inputs, and others add sum and bias."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute `(..., out_features / n)` of `(..., in_features)`, or `(..., out_features)` of a rank's inputs."""
        bias = local(self.bias) if isinstance(self.bias, DTensor) else None
        return F.linear(input, local(self.weight), bias)


class Packed(nn.Module):
    """Several layers of which a rank computes some outputs each, as one product, such as `Attention.qkv`.

    Each is one parameter, `(rows, in_features)` with `Shard(0)`, so that a checkpoint fits any number of
    ranks. `weight` and `bias` are this rank's rows of all `parts` (names and rows), one plain tensor.
    """

    def __init__(self, layer: nn.Linear, parts: dict[str, int], mesh: DeviceMesh) -> None:
        super().__init__()
        self.names = {"weight": [*parts], "bias": [] if layer.bias is None else [f"{name}_bias" for name in parts]}
        for kind, names in self.names.items():
            for name, piece in zip(names, getattr(layer, kind).split([*parts.values()]) if names else (), strict=True):
                self.register_parameter(name, _placed(piece, mesh, Shard(0)))

    @property
    def weight(self) -> Tensor:
        """This rank's rows, `(sum of rows / n, in_features)`."""
        return torch.cat([local(getattr(self, name)) for name in self.names["weight"]])

    @property
    def bias(self) -> Tensor | None:
        """This rank's biases, `(sum of rows / n,)`, or None."""
        parts = [local(getattr(self, name)) for name in self.names["bias"]]
        return torch.cat(parts) if parts else None


class Words(nn.Embedding):
    """An embedding of which a rank has some words."""

    leave = staticmethod(leaving)
    """How ranks add up what each has found."""

    def forward(self, input: Tensor) -> Tensor:
        """Look words `(...)` up: `(..., dim)`, the same on every rank unless `leave` divides the sequence."""
        mesh, rows = self.weight.device_mesh, local(self.weight)
        places = input - first_row(self.num_embeddings, mesh)
        other = (places < 0) | (places >= rows.shape[0])
        found = F.embedding(places.masked_fill(other, 0), rows).masked_fill(other.unsqueeze(-1), 0.0)
        return self.leave(found, mesh)


def divide(layer: nn.Module, kind: type[nn.Module], dimension: int, mesh: DeviceMesh) -> None:
    """Make a layer's weight, and the bias of its outputs, DTensors of which each rank has a part, in place."""
    layer.weight = _placed(layer.weight, mesh, Shard(dimension))
    if kind is Divided and dimension == 0 and layer.bias is not None:
        layer.bias = _placed(layer.bias, mesh, Shard(0))
    layer.__class__ = kind


class Sharded(ParallelStyle):
    """Shard one attention or feed-forward: it gets what every rank has, and returns the sum over the ranks.

    `columns` names the layers that read the input, with what each packs, or None; `rows` the one that is added up.
    With `sequence` ranks get and return parts of the sequence.
    """

    def __init__(self, columns: dict[str, dict[str, int] | None], rows: str) -> None:
        self.columns, self.rows, self.sequence = columns, rows, False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parts in self.columns.items():
            if parts is None:
                divide(getattr(module, name), Divided, 0, device_mesh)
            else:
                setattr(module, name, Packed(getattr(module, name), parts, device_mesh))
        last = getattr(module, self.rows)
        divide(last, Divided, 1, device_mesh)
        if isinstance(module, Attention):  # those of transformers count the heads that they find
            module.num_heads //= device_mesh.size()
            module.num_kv_heads //= device_mesh.size()
        enter, leave = (gathered, scattered) if self.sequence else (entering, leaving)
        module.register_forward_pre_hook(partial(replace_input, partial(enter, mesh=device_mesh)), with_kwargs=True)
        module.register_forward_hook(partial(_leave, partial(leave, mesh=device_mesh), self._bias(last, device_mesh)))
        return module

    def _bias(self, last: nn.Linear, mesh: DeviceMesh) -> Callable[[], Tensor | None]:
        """What is added to the sum; its gradients come from a part of the sequence if that is divided."""
        return lambda: entering(last.bias, mesh) if self.sequence and last.bias is not None else last.bias


def parts_of(module: Attention | FeedForward) -> Sharded:
    """Return how to shard an `Attention` or a `FeedForward`."""
    if isinstance(module, Attention):
        queries, keys = module.num_heads * module.head_dim, module.num_kv_heads * module.head_dim
        return Sharded({"qkv": {"query": queries, "key": keys, "value": keys}}, "out")
    if not module.gated:
        return Sharded({"up": None}, "down")
    hidden = module.gate_up.out_features // 2
    return Sharded({"gate_up": {"gate": hidden, "up": hidden}}, "down")


def _leave(
    leave: Callable[[Tensor], Tensor], bias_of: Callable[[], Tensor | None], module: nn.Module, args: Any, output: Any
) -> Any:
    found, bias = leave(output[0] if isinstance(output, tuple) else output), bias_of()
    found = found if bias is None else found + bias
    return (found, *output[1:]) if isinstance(output, tuple) else found


def _placed(whole: Tensor, mesh: DeviceMesh, placement: Shard) -> nn.Parameter:
    found = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)  # nothing is sent
    return nn.Parameter(found, whole.requires_grad)
