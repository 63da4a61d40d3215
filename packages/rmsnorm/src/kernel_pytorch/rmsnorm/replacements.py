"""What this package can stand in for: `patch(model)` puts it there in place, `unpatch(model)` takes it off."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ._core import patching
from ._core.patching import Found, Patched
from .functional import CASTINGS, Casting, rms_norm
from .module import RMSNorm

PACKAGE = "rmsnorm"
EPS = ("variance_epsilon", "eps", "epsilon")
"""Attributes in which modules keep what is added to the mean square."""
ALIKE = 0.99
"""Share of the elements of a result in 16 bits that must be the very same: another place of rounding changes more."""


def patch(model: torch.nn.Module) -> Patched:
    """Let `rms_norm` compute every RMSNorm of a model, in place.

    A norm is known by what its forward computes, not by its class: a module with one parameter `weight` `(N,)` and an
    eps whose results are those of `rms_norm`, for one of its castings and an offset of 0 or 1. Parameters, names and
    classes stay; `kernel_pytorch.rmsnorm.unpatch` takes it off again.

    Args:
        model: a model, or a part of one, before it is compiled.

    Returns:
        What was replaced, and why the rest was not.

    Raises:
        TypeError: `model` is no module, or is compiled or scripted.
    """
    return patching.patch(model, PACKAGE, [_find])


def unpatch(model: torch.nn.Module) -> None:
    """Undo `patch`: every module has the forward of its class again."""
    patching.unpatch(model, PACKAGE)


def _find(module: torch.nn.Module) -> Found | str | None:
    """What computes this norm, why it is left alone, or None if it is none."""
    weight = module._parameters.get("weight")
    eps = next((getattr(module, name) for name in EPS if hasattr(module, name)), None)
    if isinstance(module, RMSNorm) or list(module.children()) or list(module._parameters) != ["weight"]:
        return None
    named = "RMSNorm" in type(module).__name__
    if weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return f"its weight must be (N,) and its eps a float; they are {weight} and {eps}" if named else None
    formula = _formula(module, eps, weight.numel())
    if formula is None:
        return "it computes something else than rms_norm" if named else None
    return Found(_forward(module, eps, *formula), f"rms_norm, offset {formula[0]:g}, casting {formula[1]!r}")


def _forward(module: torch.nn.Module, eps: float, offset: float, casting: Casting) -> patching.Forward:
    stock = patching.stock(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        weight = self.weight
        if len(args) != 1 or kwargs or args[0].dtype != weight.dtype:  # mixed dtypes are rounded as the class does
            return stock(self, *args, **kwargs)
        return rms_norm(args[0], weight, eps=eps, offset=offset, casting=casting)

    return forward


def _formula(module: torch.nn.Module, eps: float, columns: int) -> tuple[float, Casting] | None:
    """The offset and the casting with which `rms_norm` gives what this module's class gives, or None."""
    candidates = list(itertools.product((0.0, 1.0), CASTINGS))
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(16, columns, generator=generator).to(dtype)
        weight = torch.rand(columns, generator=generator).add(0.5).to(dtype)
        try:
            given = patching.stand_in(module, {}, _parameters={"weight": torch.nn.Parameter(weight)})(x)
        except Exception:  # it takes other arguments, or looks at more than this
            return None
        candidates = [c for c in candidates if _same(given, x, weight, eps, *c)]
    return candidates[0] if candidates else None


def _same(given: Any, x: Tensor, weight: Tensor, eps: float, offset: float, casting: Casting) -> bool:
    ours = rms_norm(x, weight, eps=eps, offset=offset, casting=casting, level="reference")
    if x.dtype == torch.float32:
        return patching.agree(ours, given, 1e-6)
    return patching.agree(ours, given, 1e-2) and bool((ours == given).double().mean() >= ALIKE)
