"""What this package can stand in for: `patch(model)` puts it there in place, `unpatch(model)` takes it off."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ._core import patching
from ._core.patching import Found, Patched
from .decoder_layer import FIRST, SECOND, Formula, proven_keywords, with_sum
from .functional import CASTINGS, RMS_NORM, Casting, rms_norm
from .levels import LADDER
from .module import RMSNorm

PACKAGE = "rmsnorm"
EPS = ("variance_epsilon", "eps", "epsilon")
"""Attributes in which modules keep what is added to the mean square."""
ALIKE = 0.99
"""Share of the 16-bit results that must be equal bit for bit: fewer are where the formula rounds elsewhere."""


def patch(model: torch.nn.Module, *, gpu_bound: bool = False) -> Patched:
    """Let `rms_norm` compute every RMSNorm of a model, in place.

    A norm is known by what its forward computes, not by its class: a module with one parameter `weight` `(N,)` and an
    eps whose results are those of `rms_norm`, for one of its castings and an offset of 0 or 1. In a decoder layer like
    Llama's, `add_rms_norm` computes the residual sum and the norm behind the attention. Parameters, names and classes
    stay; `kernel_pytorch.rmsnorm.unpatch` takes it off again.

    Args:
        model: a model, or a part of one, before it is compiled.
        gpu_bound: whether `torch.nn.RMSNorm` is replaced too. PyTorch has a kernel for it; ours takes less time of the
            GPU and more of the host, so a model gets faster where the GPU is the limit, and slower elsewhere.

    Returns:
        What was replaced, and why the rest was not.

    Raises:
        TypeError: `model` is no module, or is compiled or scripted.
    """
    return patching.patch(model, PACKAGE, [_find_layer, _find], gpu_bound=gpu_bound)


def unpatch(model: torch.nn.Module) -> None:
    """Undo `patch`: every module has the forward of its class again."""
    patching.unpatch(model, PACKAGE)


def _find_layer(module: torch.nn.Module) -> Found | str | None:
    """A decoder layer whose second norm is one that this package computes, why it is left alone, or None."""
    norm = module._modules.get(SECOND)
    formula = _known(norm) if norm is not None and module._modules.get(FIRST) is not None else None
    if not isinstance(formula, Formula):
        return None
    defaults = proven_keywords(module)
    if defaults is None:
        return "its residual sum and its second norm stay apart: it computes something else than layers like Llama's"
    return with_sum(module, defaults, formula, PACKAGE, _is_left_to_class)


def _find(module: torch.nn.Module) -> Found | str | None:
    """What computes this norm, why it is left alone, or None if it is none."""
    formula = _known(module)
    if not isinstance(formula, Formula):
        return formula
    by = f"rms_norm, offset {formula.offset:g}, casting {formula.casting!r}"
    return Found(_forward(module, formula), by, gpu_bound=type(module) is torch.nn.RMSNorm)


def _known(module: torch.nn.Module) -> Formula | str | None:
    """What a norm computes, why it is left alone, or None if it is none."""
    weight = module._parameters.get("weight")
    if isinstance(module, RMSNorm):
        return None
    named = "rmsnorm" in type(module).__name__.lower()
    if list(module.children()) or list(module._parameters) != ["weight"]:
        named = named and bool(module._parameters)  # without any it holds a norm
        return "it must have one parameter, weight (N,), and no children" if named else None
    name = next((name for name in EPS if isinstance(getattr(module, name, None), float)), None)
    if weight is None or weight.dim() != 1 or name is None or module._buffers:
        return "it must have a weight (N,), an eps that is a float, and no buffers" if named else None
    formula = _formula(module, name, weight.numel())
    if formula is None:
        return "it computes something else than rms_norm" if named else None
    return formula


def _forward(module: torch.nn.Module, formula: Formula) -> patching.Forward:
    stock, (eps_name, offset, casting) = patching.forward_of_class(module), formula

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if (
            x is None
            or patching.is_compiled_inference()
            or _is_left_to_class(x)
            or x.dtype != self.weight.dtype  # rounded as the class does it
            or patching.is_autocast(x)
        ):
            return stock(self, *args, **kwargs)
        return RMS_NORM(x, self.weight, getattr(self, eps_name), offset, casting, None)

    return forward


def _is_left_to_class(x: Tensor) -> bool:
    """Whether the class's own forward computes this: on a CPU, where the default is PyTorch's operators."""
    return x.is_cpu and not torch.compiler.is_compiling() and LADDER.is_native("rms_norm", x)


def _formula(module: torch.nn.Module, name: str, columns: int) -> Formula | None:
    """The offset and the casting with which `rms_norm` gives what this module's class gives, or None."""
    candidates, eps = list(itertools.product((0.0, 1.0), CASTINGS)), getattr(module, name)
    generator = torch.Generator().manual_seed(0)
    # Rows in which eps counts for nothing, for half and for all.
    sizes = torch.tensor([1.0, 1e3, eps**0.5, 0.1 * eps**0.5], dtype=torch.float32).repeat_interleave(8).unsqueeze(1)
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(len(sizes), columns, generator=generator, dtype=torch.float32) * sizes).to(dtype)
        weight = torch.rand(columns, generator=generator, dtype=torch.float32).add(0.5).to(dtype)
        given = patching.tried(module, x, _parameters={"weight": torch.nn.Parameter(weight)})
        candidates = [c for c in candidates if _same(given, x, weight, eps, *c)]
    return Formula(name, *candidates[0]) if candidates else None


def _same(given: Tensor | None, x: Tensor, weight: Tensor, eps: float, offset: float, casting: Casting) -> bool:
    ours = rms_norm(x, weight, eps=eps, offset=offset, casting=casting, level="reference")
    if x.dtype == torch.float32:
        return patching.agree(ours, given, 1e-6)
    return patching.agree(ours, given, 1e-2) and bool((ours == given).double().mean() >= ALIKE)
