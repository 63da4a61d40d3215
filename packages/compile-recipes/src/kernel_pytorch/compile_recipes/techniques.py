"""`patch` and `unpatch` of every installed technique at once."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.technique import Technique

from .state import check_module


@dataclass
class Patches:
    """What `patch` did, by package.

    Attributes:
        done: by name of the package, its own report: `replaced` and `left`, each by the path of a module.
        broken: by name of a package that could not be loaded or raised, why.
        options: by keyword, the packages that have it and got it.
    """

    done: dict[str, Any] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    options: dict[str, list[str]] = field(default_factory=dict)

    @property
    def replaced(self) -> dict[str, str]:
        """By `package path`, what computes the module now."""
        return {f"{name} {path}": by for name, found in self.done.items() for path, by in found.replaced.items()}

    @property
    def left(self) -> dict[str, str]:
        """By `package path`, why the package left a module alone that looked replaceable."""
        return {f"{name} {path}": why for name, found in self.done.items() for path, why in found.left.items()}

    def __str__(self) -> str:
        """A line for each package with what it replaced, and one for each module that was left alone."""
        lines = []
        for name, found in self.done.items():
            lines += [f"{name}: {count} x {by}" for by, count in Counter(found.replaced.values()).items()]
        lines += [f"{where or 'the model'}: left alone, {why}" for where, why in self.left.items()]
        lines += [f"{name}: not applied, {why}" for name, why in self.broken.items()]
        lines += [f"{option}: passed to {', '.join(names)}" for option, names in self.options.items()]
        return "\n".join(lines) or "nothing was replaced"


def able() -> dict[str, Technique]:
    """The installed techniques that can be patched into a model, by name."""
    return {t.name: t for t in discover().techniques.values() if t.replacements}


def replacement(technique: Technique) -> Callable[..., Any]:
    """The `patch` of a package."""
    return importlib.import_module(str(technique.replacements)).patch  # type: ignore[no-any-return]


def patch(model: torch.nn.Module, **options: Any) -> Patches:
    """Let every installed technique compute what it can of a model, in place.

    Each package decides for itself, by what a module computes: see its own `patch`. Parameters, names, hooks and
    classes stay; `unpatch` takes all of it off again.

    Args:
        model: a model, or a part of one, before it is compiled.
        options: keywords of the packages' own `patch`; each package gets those that it has. `gpu_bound=True` (rmsnorm,
            fused-ln-act): also replace norms that PyTorch has kernels for.

    Returns:
        What each package replaced, and why it left the rest alone.

    Raises:
        TypeError: `model` is no module, or is compiled or scripted; or no package has one of the keywords.
    """
    check_module(model)
    found = {name: replacement(technique) for name, technique in able().items()}
    allowed = {name: [*inspect.signature(patch).parameters][1:] for name, patch in found.items()}
    patches = Patches(options={o: [name for name, known in allowed.items() if o in known] for o in options})
    if unknown := [option for option, names in patches.options.items() if not names]:
        known = "; ".join(f"{name}: {', '.join(names)}" for name, names in allowed.items() if names)
        raise TypeError(
            f"patch: given {', '.join(unknown)}; the keywords of the installed packages are {known or 'none'}"
        )
    for name, replace in found.items():
        try:
            patches.done[name] = replace(model, **{o: value for o, value in options.items() if o in allowed[name]})
        except TypeError as error:
            patches.broken[name] = str(error)
    return patches


def replaceable(model: torch.nn.Module) -> dict[str, dict[str, str]]:
    """By name of a package, what its `patch` would replace, by path: asked of copies that share all tensors."""
    found: dict[str, dict[str, str]] = {}
    for name, technique in able().items():
        try:
            twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
            found[name] = technique.patch(twin).replaced
        except Exception:  # of many kinds: what cannot be copied, or is refused
            found[name] = {}
    return found


def unpatch(model: torch.nn.Module) -> None:
    """Undo `patch`: every module has the forward of its class again.

    Raises:
        TypeError: `model` is no module, or is compiled or scripted.
    """
    check_module(model)
    for technique in able().values():
        technique.unpatch(model)
