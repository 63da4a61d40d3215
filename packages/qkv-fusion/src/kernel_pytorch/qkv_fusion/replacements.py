"""`fuse` computes layers that read the same tensor as one product; `unfuse` undoes it, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ._core import patching
from ._core.patching import Patched
from .modules.group import LinearGroup, Member, check_layers, pack_members
from .modules.scope import Scope, why_apart
from .proof import why_not_shared
from .rotation import find_rotation

PACKAGE = "qkv-fusion"

GROUPS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"))
"""Names of layers that read the same tensor: Llama, Mistral, Qwen, Gemma and others; BERT and ViT; gated MLPs."""

PACKED = ("Wqkv", "c_attn", "qkv", "in_proj_weight", "qkv_proj", "query_key_value")
"""Names of layers and parameters that are one product already, which `fuse` does not change."""


def fuse(module: torch.nn.Module, groups: Sequence[Sequence[str]] = GROUPS) -> torch.nn.Module:
    """Make one product of the layers in `module` that read the same tensor, in place.

    Layers are found by their names, at any depth. They stay in place: a model's own code calls `q_proj`, `k_proj` and
    `v_proj` as before, and in each call of the module that has them the first one computes all. `fuse` runs the forward
    on trial inputs to check that all get the same tensor; if not, as in cross-attention, the layers stay as they are,
    and `fusion_report` says why. The state_dict keeps its names and tensors, so checkpoints load and save as before.
    The parameters are packed: make the optimizer, freeze by name, wrap in DistributedDataParallel and shard afterwards.
    A state_dict's tensors are views of the packed ones, which `safetensors.torch.save_model` does not take;
    `save_pretrained` and `safetensors.torch.save_file` do.
    A model whose projections are one product already (GPT-2's `c_attn`, `Wqkv`, `qkv`, `in_proj_weight`) is unchanged.

    Args:
        module: a model, or a part of one.
        groups: names of layers that read the same tensor.

    Returns:
        The same module.

    Raises:
        TypeError: a layer is no plain torch.nn.Linear (an adapter, a quantised layer, one with hooks), `module` is no
            module, or a group no sequence of names.
        ValueError: layers of a group differ in dtype, device, bias or requires_grad, share parameters with other
            layers, or there are none, and nothing that is one product already; the model is in DistributedDataParallel,
            or there are no groups.
    """
    _check_module(module)
    _check_groups(groups)
    if any(isinstance(each, DistributedDataParallel) for each in module.modules()):
        raise ValueError("module: DistributedDataParallel knows its parameters already; fuse the model, then wrap it")
    found = list(_found(module, groups))
    for path, parent, names in found:
        if reason := why_not(module, path, parent, names):
            raise reason
    for path, parent, names in found:
        if why_not_shared(path, parent, names) is None:
            _replace(parent, names)
    if not found and not _is_packed(module):
        names_of = " or ".join(", ".join(names) for names in groups)
        raise ValueError(
            f"module: {type(module).__name__} has no layers named {names_of}, and none of {', '.join(PACKED)}"
        )
    return module


def _check_module(module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module: given {type(module).__name__}; it must be a torch.nn.Module")


def _check_groups(groups: Any) -> None:
    """Raise TypeError or ValueError unless these are sequences of names."""
    for each in groups if isinstance(groups, Sequence) else [groups]:
        if isinstance(each, str) or not isinstance(each, Sequence) or not all(isinstance(name, str) for name in each):
            raise TypeError(f"groups: given {each!r}; each group must be a sequence of names")
    if not groups:
        raise ValueError("groups: given none; there must be at least one")


def unfuse(module: torch.nn.Module) -> torch.nn.Module:
    """Undo `fuse`: the layers are torch.nn.Linear again, with separate, bit-identical parameters.

    Args:
        module: what was given to `fuse`, or a part of it.

    Returns:
        The same module.

    Raises:
        TypeError: `module` is no module.
        ValueError: the model is in DistributedDataParallel, or `fully_shard` divided its parameters.
    """
    _check_module(module)
    for each in module.modules():
        if isinstance(each, DistributedDataParallel):
            raise ValueError("module: DistributedDataParallel knows its parameters already; unfuse, then wrap it")
        if (first := _first(each)) is not None and any(hasattr(p, "placements") for p in first.group.parameters()):
            raise ValueError("module: its parameters are divided among ranks; unfuse before fully_shard")
    for parent in list(module.modules()):
        while (first := _first(parent)) is not None:
            group = first.group
            if group.handle is not None:
                group.handle.remove()
            for name, layer in group.to_linears().items():
                setattr(parent, name, layer)
        if (scope := _scope(parent)) is not None:
            del parent.forward
            if (inner := scope.__dict__.get("forward")) is not None:  # of a patch
                parent.forward = inner  # type: ignore[method-assign]
    return module


def fusion_report(module: torch.nn.Module, groups: Sequence[Sequence[str]] = GROUPS) -> Patched:
    """Say which layers of a model `fuse` made one product, and why it left others alone.

    Args:
        module: a model, or a part of one, before or after `fuse`.
        groups: names of layers that read the same tensor, as given to `fuse`.

    Returns:
        In `replaced`, by the path of the module that has them, the layers that share a product; in `left` those that do
        not, with the reason.

    Raises:
        TypeError: `module` is no module, or a group no sequence of names.
        ValueError: there are no groups.
    """
    _check_module(module)
    _check_groups(groups)
    report = Patched()

    def tell(where: dict[str, str], path: str, names: Sequence[str], said: str) -> None:
        before = f"{where[path]}; " if path in where else ""
        where[path] = f"{before}{', '.join(names)}: {said}"

    for path, parent in module.named_modules():
        scope = _scope(parent)
        for shared in [] if scope is None else scope.groups:
            if (reason := why_apart(parent, shared)) is None:
                tell(report.replaced, path, shared, "one product")
            else:
                tell(report.left, path, shared, f"computed one by one: {reason}")
    for path, parent, names in _found(module, groups):
        error = why_not(module, "", parent, names)
        tell(report.left, path, names, str(error or why_not_shared(path, parent, names) or "`fuse` was not called"))
    return report


def patch(model: torch.nn.Module) -> Patched:
    """Let `rotary_embedding` rotate queries and keys in the attention of Hugging Face's transformers, in place.

    An attention is known by the function `apply_rotary_pos_emb` that its forward calls, if that gives what
    `rotary_embedding` gives; the rest of the forward stays as its module had it when it was patched. Projections stay
    apart, since packing them makes new parameters: `fuse` does that.

    Args:
        model: a model, or a part of one, before it is compiled.

    Returns:
        What was replaced, and why the rest was not.

    Raises:
        TypeError: `model` is no module, or is compiled or scripted.
    """
    return patching.patch(model, PACKAGE, [find_rotation])


def unpatch(model: torch.nn.Module) -> None:
    """Undo `patch`: every module has the forward of its class again."""
    patching.unpatch(model, PACKAGE)


def why_not(
    model: torch.nn.Module, path: str, parent: torch.nn.Module, names: Sequence[str]
) -> TypeError | ValueError | None:
    """Why these layers of a part of a model cannot be one product, or None if they can."""
    layers = {name: getattr(parent, name) for name in names}
    try:
        check_layers(layers)
        _check_shared(model, layers)
    except (TypeError, ValueError) as error:
        return type(error)(f"{path}.{error}" if path else str(error))
    return None


def _replace(parent: torch.nn.Module, names: Sequence[str]) -> None:
    group = LinearGroup.from_linears({name: getattr(parent, name) for name in names})
    group.handle = parent.register_load_state_dict_pre_hook(pack_members) if _first(parent) is None else None
    for index, name in enumerate(names):
        setattr(parent, name, Member(group, index))
    before, scope = _scope(parent), Scope(parent, [names])
    if before is not None:
        scope.groups += before.groups
    if (inner := (before or parent).__dict__.get("forward")) is not None:  # of a patch
        scope.forward = inner
    parent.forward = scope.method  # type: ignore[method-assign]


def _scope(module: torch.nn.Module) -> Scope | None:
    """The `Scope` that `fuse` made the module's forward, or None."""
    scope = getattr(module.__dict__.get("forward"), "__self__", None)
    return scope if isinstance(scope, Scope) and scope.module is module else None


def _first(parent: torch.nn.Module) -> Member | None:
    """The first layer of a group among the children of `parent`, or None."""
    return next((child for child in parent.children() if isinstance(child, Member) and child.index == 0), None)


def _found(
    module: torch.nn.Module, groups: Sequence[Sequence[str]]
) -> Iterator[tuple[str, torch.nn.Module, list[str]]]:
    """Path, parent and names of each group of layers, in the order in which the parent has them."""
    for path, parent in module.named_modules():
        for group in groups:
            names = [name for name, _ in parent.named_children() if name in group]
            if len(names) == len(group) and not isinstance(getattr(parent, names[0]), Member):
                yield path, parent, names


def _is_packed(module: torch.nn.Module) -> bool:
    """Whether a model has layers that are one product already, by `fuse` or as the model was written."""
    names = {path.rpartition(".")[2] for path, _ in (*module.named_modules(), *module.named_parameters())}
    return not names.isdisjoint(PACKED) or any(isinstance(each, LinearGroup) for each in module.modules())


def _check_shared(model: torch.nn.Module, layers: Mapping[str, torch.nn.Module]) -> None:
    """Raise ValueError if a parameter of these layers has another place in the model too, as tied weights have."""
    places = Counter(id(p) for m in set(model.modules()) for p in m._parameters.values() if p is not None)
    modules = Counter(id(m) for each in set(model.modules()) for m in each._modules.values() if m is not None)
    for name, layer in layers.items():
        if modules[id(layer)] > 1 or any(places[id(p)] > 1 for p in layer.parameters()):
            raise ValueError(f"{name}: it shares a parameter with another layer of the model, which packing would part")
