"""Training on several devices by PyTorch's own engine: which module gets which treatment, and a report of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from kernel_pytorch.models.block import Attention, FeedForward
from kernel_pytorch.models.language_model import LanguageModel
from kernel_pytorch.qkv_fusion import LinearGroup

from .shards import Sharded, Words, divide, parts_of

ATTENTION = ("q_proj", "k_proj", "v_proj"), "o_proj"
FEED_FORWARD = ("gate_proj", "up_proj"), "down_proj"
"""Names, in models of transformers like Llama, of the layers that read the input, and of that whose results add up."""


@dataclass
class Parallelized:
    """What a helper did.

    Attributes:
        model: what to call from now on: the model itself, or what `DistributedDataParallel` made around it.
        treated: by the path of a module, what was done.
        left: by the path of a module, why it was left alone.
    """

    model: nn.Module
    treated: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """A line for each path."""
        treated = [f"{path or 'the model'}: {what}" for path, what in self.treated.items()]
        return "\n".join([*treated, *(f"{path or 'the model'}: left alone, {why}" for path, why in self.left.items())])


def data_parallel(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Parallelized:
    """Give every rank the whole model and a part of the batch: gradients are averaged in the backward (DDP).

    Patch and fuse the model before. Without `no_sync()` of the result each backward sends all gradients: use it for
    all but the last when gradients are accumulated.

    Args:
        model: the same on every rank, on this rank's device.
        mesh: the ranks, of one dimension.
        options: of `torch.nn.parallel.DistributedDataParallel`; `gradient_as_bucket_view` is True unless given.

    Raises:
        ValueError: mesh has several dimensions, or the model is sharded.
    """
    _check_mesh(mesh)
    if sharded := [name for name, each in model.named_parameters() if isinstance(each, DTensor)]:
        raise ValueError(f"model: {sharded[0]} is sharded; beside tensor_parallel use fully_sharded on the other ranks")
    options = {"gradient_as_bucket_view": True, **options}
    found = DistributedDataParallel(model, process_group=mesh.get_group(), **options)
    return Parallelized(found, {"": f"whole on each of {mesh.size()} ranks, gradients averaged"})


def fully_sharded(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    layers: Iterable[nn.Module] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    **options: Any,
) -> Parallelized:
    """Give every rank a part of each parameter: a layer's are gathered before it computes, in place (FSDP2).

    Each decoder layer is a unit, whose parameters travel together, and the rest of the model is another. Replacements
    by `patch` stay, and may be put in afterwards too; `fuse` comes before. Inputs of layers are not cast, so that
    tables of rotations stay float32 under mixed precision.

    Args:
        model: the same on every rank, or after `tensor_parallel` on the other dimension of a mesh of two.
        mesh: the ranks among which parameters are divided, of one dimension; of two for replicas of such groups, the
            replicas first.
        layers: the units; None for the children of the model's outermost lists of modules.
        param_dtype: in which the model computes and parameters are gathered; None for that of the parameters, which
            optimizers keep.
        reduce_dtype: in which gradients are added up; None for param_dtype.
        options: of `torch.distributed.fsdp.fully_shard`, such as `reshard_after_forward` and `offload_policy`.

    Raises:
        ValueError: the model is sharded so already.
    """
    if isinstance(model, FSDPModule):
        raise ValueError("model: fully_shard was applied to it before; once is enough")
    units = {id(each) for each in (decoder_layers(model) if layers is None else layers)}
    found = Parallelized(model)
    kinds = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    for path, module in [*model.named_modules()]:
        if id(module) in units:
            policy = MixedPrecisionPolicy(**kinds, cast_forward_inputs=False)
            fully_shard(module, mesh=mesh, mp_policy=policy, **options)
            found.treated[path] = f"a unit, divided among {mesh.size()} ranks"
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**kinds), **options)
    found.treated[""] = f"what is in no layer is a unit, divided among {mesh.size()} ranks"
    return found


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> Parallelized:
    """Divide the heads of attention and the columns of feed-forwards among ranks that get the same batch, in place.

    `LanguageModel`: packed projections stay one product, embedding and head are divided by words, and the loss is
    `vocabulary_parallel_linear_cross_entropy`. Models of transformers like Llama: the seven projections of a layer
    are divided, embedding and head stay whole. Replacements by `patch` stay, and may be put in afterwards too. Each
    attention and each feed-forward adds up its outputs in the forward and the gradients of its input in the backward.

    What is not divided is computed on every rank alike, from the same inputs. Parameters that are divided are
    DTensors on mesh, so `fully_sharded` on another dimension comes after this; the optimizer is made after both.

    Args:
        model: the same on every rank; unfused.
        mesh: the ranks, of one dimension, which should be devices of one host.

    Raises:
        TypeError: a projection is no plain torch.nn.Linear.
        ValueError: mesh has several dimensions; ranks do not divide heads or columns; the model is fused or sharded;
            an attention has more parameters than the four projections'; or there is nothing to divide.
    """
    _check_mesh(mesh)
    _check_order(model)
    found = Parallelized(model)
    plan: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, (Attention, FeedForward)):
            _check_own(path, module, mesh.size())
            plan[path] = parts_of(module)
        elif (style := _like_llama(path, module, mesh.size())) is not None:
            plan[path] = style
        if path in plan:
            _check_layers(path, module, plan[path])
            columns = ", ".join(plan[path].columns)
            found.treated[path] = f"{columns} and {plan[path].rows} divided among {mesh.size()} ranks, one sum"
    if not plan:
        raise ValueError("model: it has no attention or feed-forward like those of LanguageModel or Llama")
    for path, style in plan.items():
        parallelize_module(model.get_submodule(path), mesh, style)
    _divide_words(model, mesh, found)
    return found


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the children of the outermost lists of modules, in which models keep their layers."""
    found: list[nn.Module] = []
    for child in model.children():
        is_list = isinstance(child, nn.ModuleList) and not all(isinstance(each, nn.Linear) for each in child)
        found += [*child] if is_list else decoder_layers(child)
    return found


def _divide_words(model: nn.Module, mesh: DeviceMesh, found: Parallelized) -> None:
    if isinstance(model, LanguageModel):
        divide(model.embedding, Words, 0, mesh)
        found.treated["embedding"] = f"its words divided among {mesh.size()} ranks"
        if model.head is not None:
            divide(model.head, nn.Linear, 0, mesh)
            found.treated["head"] = found.treated["embedding"]
        return
    get = getattr(model, "get_output_embeddings", None)
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) or (get is not None and module is get()):
            found.left[path] = "whole on every rank"


def _like_llama(path: str, module: nn.Module, ranks: int) -> Sharded | None:
    """How to shard an attention or a feed-forward of transformers, None for other modules."""
    names = {name for name, _ in module.named_children()}
    for columns, rows in (ATTENTION, FEED_FORWARD):
        if not names.issuperset((*columns, rows)):
            continue
        more = [name for name, _ in module.named_parameters() if name.split(".")[0] not in (*columns, rows)]
        if more:
            raise ValueError(f"{path}.{more[0]}: it is not known how to divide it; tensor_parallel knows {rows}'s kin")
        head = getattr(module, "head_dim", 1) if rows == "o_proj" else 1
        for name in (*columns, rows):
            layer = getattr(module, name)
            width = getattr(layer, "in_features" if name == rows else "out_features", 0)  # another class is refused
            _check_divides(f"{path}.{name}", width // head, ranks, "heads" if rows == "o_proj" else "columns")
        return Sharded(dict.fromkeys(columns), rows)
    return None


def _check_own(path: str, module: nn.Module, ranks: int) -> None:
    if isinstance(module, Attention):
        _check_divides(f"{path}.qkv", module.num_kv_heads, ranks, "heads of keys")
    elif isinstance(module, FeedForward):
        _check_divides(f"{path}.down", module.down.in_features, ranks, "columns")


def _check_layers(path: str, module: nn.Module, style: Sharded) -> None:
    for name in (*style.columns, style.rows):
        if type(layer := getattr(module, name)) is not nn.Linear:
            raise TypeError(f"{path}.{name}: it is {type(layer).__name__}; it must be torch.nn.Linear")


def _check_divides(path: str, count: int, ranks: int, what: str) -> None:
    if count % ranks:
        raise ValueError(f"{path}: it has {count} {what}, which {ranks} ranks do not divide; use a divisor of {count}")


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        names = ", ".join(map(repr, mesh.mesh_dim_names or ())) or "unnamed"
        raise ValueError(f"mesh: it has {mesh.ndim} dimensions ({names}); give one of them, as mesh['tp']")


def _check_order(model: nn.Module) -> None:
    """Raise ValueError where something was done to a model that must come later, or not at all."""
    for path, module in model.named_modules():
        if isinstance(module, LinearGroup):
            raise ValueError(
                f"{path or 'model'}: its layers were fused, and a packed weight has no heads to divide; call "
                "kernel_pytorch.qkv_fusion.unfuse(model) first. LanguageModel has packed layers that are divided"
            )
        if isinstance(module, (FSDPModule, DistributedDataParallel)):
            raise ValueError(f"{path or 'model'}: it is {type(module).__name__}; call tensor_parallel before that")
    if any(isinstance(each, DTensor) for each in model.parameters()):
        raise ValueError("model: it has sharded parameters; call tensor_parallel first, and once")
