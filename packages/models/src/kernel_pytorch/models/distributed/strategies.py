"""Training on several devices by PyTorch's own engine: which module gets which treatment, and a report of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
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

from .sequence import check_norm, divide_between, divide_norm, gathered, scattered
from .shards import Sharded, Words, divide, parts_of

LIKE_LLAMA = (("q_proj", "k_proj", "v_proj"), "o_proj"), (("gate_proj", "up_proj"), "down_proj")
"""Names, in models of transformers like Llama, of the layers that read the input, and of that whose results add up."""


@dataclass
class Parallelized:
    """What a helper did, by paths, and did not: `treated` and `left`. `model` is what to call from now on."""

    model: nn.Module
    treated: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """A line for each path."""
        lines = self.treated | {path: f"left alone, {why}" for path, why in self.left.items()}
        return "\n".join(f"{path or 'the model'}: {what}" for path, what in lines.items())


def data_parallel(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Parallelized:
    """Give every rank the whole model and a part of the batch: gradients are averaged in the backward (DDP).

    Fuse the model before. Each backward sends all gradients, but for those under `no_sync()` of the result.

    Args:
        model: the same on every rank, on this rank's device.
        mesh: the ranks, of one dimension.
        options: of `torch.nn.parallel.DistributedDataParallel`; `gradient_as_bucket_view` is True unless given.

    Raises:
        TypeError, ValueError: mesh is no DeviceMesh of one dimension; the model is sharded, or wrapped already.
    """
    _check_mesh(mesh)
    if _is_sharded(model):
        raise ValueError("model: it has sharded parameters; beside tensor_parallel use fully_sharded")
    _check_unwrapped(model, "data_parallel")
    options = {"process_group": mesh.get_group(), "gradient_as_bucket_view": True, **options}
    found = DistributedDataParallel(model, **options)
    return Parallelized(found, {"": f"whole on each of {mesh.size()} ranks, gradients averaged"})


def fully_sharded(
    model: nn.Module, mesh: DeviceMesh, *, layers: Iterable[nn.Module] | None = None,
    param_dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None, **options: Any,
) -> Parallelized:  # fmt: skip
    """Give every rank a part of each parameter: a layer's are gathered before it computes, in place (FSDP2).

    Each decoder layer is a unit, whose parameters travel together, and the rest of the model is another. `patch` comes
    before or after this, `fuse` before. Inputs of layers are not cast: tables of rotations stay float32.

    Args:
        model: the same on every rank, or after `tensor_parallel` on the other dimension of a mesh of two.
        mesh: the ranks that divide parameters among them; of two dimensions for replicas of such groups.
        layers: the units; None for the children of the model's outermost lists of modules.
        param_dtype, reduce_dtype: of parameters in use, and of sums of gradients, as in `MixedPrecisionPolicy`.
        options: of `torch.distributed.fsdp.fully_shard`, such as `reshard_after_forward` and `offload_policy`.

    Raises:
        TypeError, ValueError: mesh is no DeviceMesh; the model is sharded or wrapped already; or it was divided by
            `tensor_parallel`, and mesh has no name, or that of the same dimension.
    """
    _check_mesh(mesh, most=None)
    _check_unwrapped(model, "fully_sharded")
    divided = {name for each in model.parameters() if isinstance(each, DTensor)
               for name in each.device_mesh.mesh_dim_names or ("",)}  # fmt: skip
    if divided and (mesh.mesh_dim_names is None or divided & {"", *mesh.mesh_dim_names}):
        raise ValueError(f"mesh: its dimensions are {mesh.mesh_dim_names}; the model is divided by tensor_parallel, "
                         "and needs another named dimension of one mesh, as mesh['dp'] beside mesh['tp']")  # fmt: skip
    found, among = Parallelized(model), f"divided among {mesh.size(mesh.ndim - 1)} ranks"
    paths = {module: path for path, module in model.named_modules()}
    for module in decoder_layers(model) if layers is None else layers:
        policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
        fully_shard(module, mesh=mesh, mp_policy=policy, **options)
        found.treated[paths[module]] = f"a unit, {among}"
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype), **options)
    found.treated[""] = f"the rest is a unit, {among}"
    return found


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> Parallelized:
    """Divide the heads of attention and the columns of feed-forwards among ranks that get the same batch, in place.

    `LanguageModel`: packed projections stay one product, embedding and head are divided by words, and the loss is
    `vocabulary_parallel_linear_cross_entropy`. Models of transformers like Llama: the seven projections of a layer
    are divided, embedding and head stay whole; `patch` comes before or after this. Each attention and each feed-forward
    adds up its outputs in the forward, and the gradients of its input in the backward. Every rank computes everything
    else. Divided parameters are DTensors: `fully_sharded` on another dimension comes after this, then the optimizer.

    Args:
        model: the same on every rank; unfused.
        mesh: the ranks, of one dimension, which should be devices of one host.
        sequence_parallel: whether ranks also divide the sequence between attention and feed-forward: norms and
            residual sums are of S / n tokens. A forward then raises ValueError unless n divides S, and refuses caches
            and packed sequences.

    Raises:
        TypeError: a projection is no plain torch.nn.Linear; or, for a divided sequence, a norm has not one weight.
        ValueError: mesh has several dimensions; ranks do not divide heads or columns; the model is fused or sharded;
            there are parameters beside the projections; there is nothing to divide; or sequence_parallel is given for
            a model without one list of layers and a `norm` after it.
    """
    _check_mesh(mesh)
    _check_order(model)
    found, plan = Parallelized(model), dict[str, Sharded]()
    for path, module in model.named_modules():
        style = parts_of(module) if isinstance(module, (Attention, FeedForward)) else _like_llama(path, module)
        if style is not None:
            _check_layers(path, module, style, mesh.size())
            style.sequence = sequence_parallel
            plan[path] = style
            found.treated[path] = f"{', '.join(style.columns)} and {style.rows} divided among {mesh.size()} ranks"
    if not plan:
        raise ValueError("model: it has no attention or feed-forward like those of LanguageModel or Llama")
    if sequence_parallel:
        _divide_sequence(model, mesh, found)
    parallelize_module(model, mesh, {**plan})
    _divide_words(model, mesh, found)
    if sequence_parallel and isinstance(model, LanguageModel):
        model.embedding.leave = scattered
        model.join_sequence = partial(gathered, mesh=mesh, differ=False)
    return found


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the children of the outermost lists of modules, in which models keep their layers."""
    found: list[nn.Module] = []
    for child in model.children():
        is_list = isinstance(child, nn.ModuleList) and not all(isinstance(each, nn.Linear) for each in child)
        found += [*child] if is_list else decoder_layers(child)
    return found


def _divide_sequence(model: nn.Module, mesh: DeviceMesh, found: Parallelized) -> None:
    """Divide what is between attention and feed-forward: from the first layer to the `norm` after the last."""
    layers, paths = decoder_layers(model), {module: path for path, module in model.named_modules()}
    last = [each.norm for each in model.modules() if hasattr(each, "norm") and decoder_layers(each)[:1] == layers[:1]]
    has_ours = not isinstance(model, LanguageModel) and any(isinstance(each, Attention) for each in model.modules())
    if len(last) != 1 or not layers or has_ours:
        raise ValueError(f"sequence_parallel: given for {type(model).__name__}; allowed are LanguageModel itself, and "
                         "models of transformers with one list of layers and `norm` after it")  # fmt: skip
    between = [child for layer in layers for child in layer.children()] + last
    norms = [each for each in between if paths[each] not in found.treated and any(True for _ in each.parameters())]
    for norm in norms:
        check_norm(paths[norm], norm)
    if not isinstance(model, LanguageModel):
        divide_between(layers[0], last[0], mesh)
    for norm in norms:
        divide_norm(norm, mesh)
        found.treated[paths[norm]] = f"of a part of the sequence, gradients added up over {mesh.size()} ranks"


def _divide_words(model: nn.Module, mesh: DeviceMesh, found: Parallelized) -> None:
    if isinstance(model, LanguageModel):
        for name, kind in {"embedding": Words, "head": nn.Linear}.items():
            if (layer := getattr(model, name)) is not None:
                divide(layer, kind, 0, mesh)
                found.treated[name] = f"its words divided among {mesh.size()} ranks"
        return
    head = getattr(model, "get_output_embeddings", lambda: None)()
    whole = [path for path, each in model.named_modules() if isinstance(each, nn.Embedding) or each is head]
    found.left |= dict.fromkeys(whole, "whole on every rank")


def _like_llama(path: str, module: nn.Module) -> Sharded | None:
    """How to shard an attention or a feed-forward of transformers, None for other modules."""
    for columns, rows in LIKE_LLAMA:
        if module._modules.keys() >= {*columns, rows}:
            if more := [name for name, _ in module.named_parameters() if name.split(".")[0] not in (*columns, rows)]:
                raise ValueError(f"{path}.{more[0]}: it is not known how to divide it, beside {', '.join(columns)}")
            return Sharded(dict.fromkeys(columns), rows)
    return None


def _check_layers(path: str, module: nn.Module, style: Sharded, ranks: int) -> None:
    """Raise TypeError or ValueError unless ranks can divide these layers."""
    unit, what = (getattr(module, "head_dim", 1), "heads") if style.rows in ("out", "o_proj") else (1, "columns")
    for name, parts in {**style.columns, style.rows: None}.items():
        if type(layer := getattr(module, name)) is not nn.Linear:
            raise TypeError(f"{path}.{name}: it is {type(layer).__name__}; it must be torch.nn.Linear")
        for width in (parts or {"": layer.in_features if name == style.rows else layer.out_features}).values():
            if width // unit % ranks:
                raise ValueError(f"{path}.{name}: {ranks} ranks do not divide {width // unit} {what}; use a divisor")


def _check_mesh(mesh: DeviceMesh, most: int | None = 1) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: given {type(mesh).__name__}; it must be a DeviceMesh, as init_device_mesh makes it")
    if mesh.ndim != (most or mesh.ndim):
        raise ValueError(f"mesh: it has {mesh.ndim} dimensions, named {mesh.mesh_dim_names}; give one of them, as "
                         "mesh['tp'] of a mesh with mesh_dim_names")  # fmt: skip


def _check_unwrapped(model: nn.Module, before: str) -> None:
    for path, module in model.named_modules():
        if isinstance(module, (FSDPModule, DistributedDataParallel)):
            raise ValueError(f"{path or 'model'}: it is {type(module).__name__}; call {before} before that")


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(each, DTensor) for each in model.parameters())


def _check_order(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, LinearGroup):
            raise ValueError(f"{path}: its layers were fused; call kernel_pytorch.qkv_fusion.unfuse(model) before this")
        if type(module).__name__ == "OptimizedModule":
            raise ValueError(f"{path or 'model'}: it is compiled; call torch.compile after tensor_parallel")
    _check_unwrapped(model, "tensor_parallel")
    if _is_sharded(model):
        raise ValueError("model: it has sharded parameters; call tensor_parallel first, and once")
