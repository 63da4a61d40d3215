"""What a change is, and those that call what others offer: patches, fused projections, layout, compilation."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch

from kernel_pytorch.compile_recipes._core import patching
from kernel_pytorch.compile_recipes._core.patching import Forward, forward_of_class, owner_of
from kernel_pytorch.compile_recipes.finders import Found as Pattern
from kernel_pytorch.compile_recipes.records import ALL, SAFE
from kernel_pytorch.compile_recipes.techniques import able

LEAST_BLOCKS = 2


@dataclass
class Context:
    """What is known of the model when changes are tried."""

    inputs: Sequence[Any] = ()  # of a call
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # named inputs of the call
    patterns: Sequence[Pattern] = ()  # that finders found
    memory_is_short: bool = False  # whether a step needs most of the memory of its device
    partial: bool = False  # whether an output that has a loss may be without its other tensors


@dataclass(frozen=True)
class Done:
    """A change that was made, in words; `masked`: whether positions that a mask hides may differ."""

    what: str
    undo: Callable[[], None]
    masked: bool = False


@dataclass(frozen=True)
class Change:
    """A change that `optimize` can make in place; what `make` returns as a string says why there is nothing to do."""

    name: str
    applies: str
    make: Callable[[torch.nn.Module, Context], Done | str]


def put(model: torch.nn.Module, owner: str, forwards: Mapping[int, Callable[..., Forward]], what: str) -> Done | str:
    """Give modules another forward, each as an attribute of the instance; or say why none can have it.

    `forwards` has, by id of a module, what makes its forward of it.
    """
    package = f"compile-recipes {owner}"
    left, count = "", 0
    for module in model.modules():
        if id(module) in forwards:
            found = patching._put(module, package, patching.Found(forwards[id(module)](module), owner))
            count += not isinstance(found, str)
            left = found if isinstance(found, str) else left
    if not count:
        return left or "nothing was replaced"
    return Done(f"{count} {what}", lambda: patching.unpatch(model, package))


def technique_changes() -> list[Change]:
    """A change for each installed technique, and one for packing projections."""
    changes = []
    for name, technique in able().items():

        def make(model: torch.nn.Module, context: Context, technique: Any = technique) -> Done | str:
            package = technique.name
            if any(owner_of(m) == package for m in model.modules()):
                return "it was patched before"
            done = technique.patch(model)
            if not done.replaced:
                return next(iter(done.left.values()), "it has nothing that this package computes")
            what = ", ".join(f"{count} x {by}" for by, count in Counter(done.replaced.values()).items())
            return Done(what, lambda: technique.unpatch(model))

        changes.append(Change(f"patch {name}", SAFE, make))
        module = importlib.import_module(str(technique.replacements))
        if hasattr(module, "fuse") and hasattr(module, "unfuse"):
            changes.append(Change("fuse", ALL, _fusing(module)))
    return changes


def _fusing(package: Any) -> Callable[[torch.nn.Module, Context], Done | str]:
    def make(model: torch.nn.Module, context: Context) -> Done | str:
        before = package.fusion_report(model)
        if before.replaced:
            return "it was fused before"
        kept = dict(model.named_parameters(remove_duplicate=False))
        try:
            package.fuse(model)
        except (TypeError, ValueError) as error:
            return str(error)
        after = package.fusion_report(model)

        def undo() -> None:
            package.unfuse(model)
            with torch.no_grad():
                for name, parameter in kept.items():  # the very parameters, which an optimizer may hold
                    parent, _, leaf = name.rpartition(".")
                    owner = model.get_submodule(parent)
                    parameter.copy_(getattr(owner, leaf))
                    owner._parameters[leaf] = parameter

        if not after.replaced:
            undo()
            return next(iter(after.left.values()), "no layers read the same tensor")
        return Done(f"one product in {len(after.replaced)} modules", undo)

    return make


def channels_last(model: torch.nn.Module, context: Context) -> Done | str:
    """Weights of convolutions in the layout that tensor cores read."""
    wide = [p for p in model.parameters() if p.dim() == 4]
    if not wide or all(p.is_contiguous(memory_format=torch.channels_last) for p in wide):
        return "it has no convolution over images whose weights lie otherwise"
    kept = [(p, p.data) for p in wide]
    for p in wide:
        p.data = p.data.contiguous(memory_format=torch.channels_last)

    def undo() -> None:
        for p, data in kept:
            data.copy_(p.data)  # what was trained since
            p.data = data

    return Done(f"{len(wide)} weights in channels_last", undo)


def blocks_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The blocks of the largest list of modules of one class: the layers of a network."""
    best: list[tuple[str, torch.nn.Module]] = []
    most = 0
    for path, child in model.named_modules():
        blocks = [*child.named_children()] if isinstance(child, torch.nn.ModuleList) else []
        size = sum(p.numel() for p in child.parameters()) if blocks else 0
        if len(blocks) >= LEAST_BLOCKS and len({type(b) for _, b in blocks}) == 1 and size > most:
            best, most = [(f"{path}.{name}", b) for name, b in blocks], size
    return best


def regional_compile(model: torch.nn.Module, context: Context) -> Done | str:
    """Each block compiled by itself: one block's code serves all."""
    blocks = blocks_of(model)
    if not blocks:
        return "it has no list of blocks of one class"
    if any(b._compiled_call_impl is not None for _, b in blocks):
        return "its blocks are compiled already"
    for _, block in blocks:
        block.compile()

    def undo() -> None:
        for _, block in blocks:
            block._compiled_call_impl = None

    return Done(f"{len(blocks)} blocks compiled, each by itself", undo)


def checkpointing(model: torch.nn.Module, context: Context) -> Done | str:
    """Each block keeps its input alone, and runs again in the backward."""
    blocks = {id(b) for _, b in blocks_of(model)} if model.training else set()
    if not blocks:
        return "it does not train, or has no list of blocks of one class"
    if not context.memory_is_short:
        return "memory is not short"
    return put(model, "checkpointing", dict.fromkeys(blocks, _checkpointed), "blocks checkpointed")


def _checkpointed(module: torch.nn.Module) -> Forward:
    own = forward_of_class(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return own(self, *args, **kwargs)
        call = MethodType(own, self)
        return torch.utils.checkpoint.checkpoint(call, *args, use_reentrant=False, **kwargs)

    return forward


LAST = (
    Change("channels_last", ALL, channels_last),
    Change("checkpointing", ALL, checkpointing),
    Change("regional compile", ALL, regional_compile),
)
"""Made after everything that changes what is computed."""
