"""What autograd keeps until the backward, by the user's line, and what checkpointing and packing would save.

`saved_tensors_hooks` see each tensor as it is kept. A storage counts once; parameters, inputs and outputs do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .recorder import Paths, memory, place_of, user_line
from .state import call, leaves_of

MASKS = ("attention_mask", "mask", "padding_mask")


@dataclass(frozen=True)
class Kept:
    """A storage that autograd keeps."""

    line: str
    path: str
    bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def saved(module: torch.nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> list[Kept]:
    """Each storage that the graph of one forward keeps until its backward, in the module's mode."""
    given = tree_leaves((inputs, dict(kwargs or {})))
    known = {memory(t) for t in (*module.parameters(), *module.buffers(), *given) if isinstance(t, Tensor)}
    kept: dict[int, Kept] = {}
    with Paths(module) as paths, torch.enable_grad():

        def note(t: Tensor) -> Tensor:
            if t.layout is torch.strided and memory(t) not in known and memory(t) not in kept:
                size = t.untyped_storage().nbytes()
                kept[memory(t)] = Kept(user_line(), paths.path, size, tuple(t.shape), t.dtype)
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            output = call(module, inputs, kwargs)
    for t in leaves_of(output):  # what the caller holds anyway
        kept.pop(memory(t), None)
    return list(kept.values())


def by_line(kept: Sequence[Kept]) -> dict[str, list[Kept]]:
    """Grouped by the user's line, or by the path of a module without one, the largest first."""
    groups: dict[str, list[Kept]] = {}
    for k in kept:
        groups.setdefault(place_of(k.line, k.path), []).append(k)
    return dict(sorted(groups.items(), key=lambda item: -sum(k.bytes for k in item[1])))


@dataclass(frozen=True)
class Checkpointing:
    """What checkpointing the blocks of the list at a path would change: bytes that are kept, over the whole module."""

    path: str
    blocks: int
    now: int
    then: int


def checkpointing(module: torch.nn.Module, kept: Sequence[Kept]) -> list[Checkpointing]:
    """Predict, for each list of at least two blocks, what remains if each block keeps its input alone.

    A block's input is taken to be its largest floating-point tensor that its first saved one resembles: the width of
    the residual stream, which blocks keep.
    """
    total, found = sum(k.bytes for k in kept), []
    for path, child in module.named_modules():
        if not isinstance(child, torch.nn.ModuleList | torch.nn.Sequential) or len(child) < 2:
            continue
        inside = [k for k in kept if k.path.startswith(f"{path}.") or (not path and k.path)]
        per_block = {i: [k for k in inside if _index(k.path, path) == str(i)] for i in range(len(child))}
        if not all(per_block.values()):
            continue
        entering = sum(_entering(group) for group in per_block.values())
        then = total - sum(k.bytes for group in per_block.values() for k in group) + entering
        if then < total:
            found.append(Checkpointing(path, len(child), total, then))
    return sorted(found, key=lambda c: c.then)


def _index(path: str, parent: str) -> str:
    return path.removeprefix(f"{parent}.").partition(".")[0] if parent else path.partition(".")[0]


def _entering(kept: Sequence[Kept]) -> int:
    """Bytes of a block's input: the smallest of its large floating-point tensors."""
    floats = [k for k in kept if k.dtype.is_floating_point and len(k.shape) > 1]
    most = max((k.bytes for k in floats), default=0)
    return min((k.bytes for k in floats if k.bytes * 16 >= most), default=0)


def padding_share(inputs: Sequence[Any], kwargs: Mapping[str, Any] | None) -> float:
    """The share of positions that a mask among the inputs says is padding; 0 if there is no mask."""
    named = [v for name, v in (kwargs or {}).items() if name in MASKS]
    masks = [m for m in named if isinstance(m, Tensor) and m.dim() == 2 and m.numel()]
    return float((masks[0] == 0).double().mean()) if masks else 0.0
