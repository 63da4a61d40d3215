"""Attention of Hugging Face's transformers with `rotary_embedding` in place of its rotation."""

from __future__ import annotations

import inspect
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from ._core import patching
from ._core.patching import Found
from .levels import LADDER
from .rotary.functional import rotary_embedding

ROTATION = "apply_rotary_pos_emb"
"""The function of transformers that an attention's forward finds among the globals of its module."""


def find_rotation(module: torch.nn.Module) -> Found | str | None:
    """An attention whose rotation this package computes, why it is left alone, or None: it is something else."""
    stock = patching.forward_of_class(module)
    inner = inspect.unwrap(stock)
    names = inner.__code__.co_names if isinstance(inner, FunctionType) else ()
    if ROTATION not in names:
        other = next((name for name in names if name.startswith("apply_rot")), None)
        return None if other is None else f"its rotation is {other}, which is not known; {ROTATION} is"
    own = inner.__globals__.get(ROTATION)
    if own is None or not _is_the_same(own):
        return f"its {ROTATION} computes something else than rotary_embedding"
    rotating = _with_globals(stock, {ROTATION: _rotation(own)})
    if rotating is None:
        return "its forward is wrapped in a function that calls it in a way that is not known"
    return Found(_forward(stock, rotating), "rotary_embedding")


def _forward(stock: patching.Forward, rotating: patching.Forward) -> patching.Forward:
    """The forward of an attention."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (stock if patching.is_compiled_inference() else rotating)(self, *args, **kwargs)

    return forward


def _rotation(own: Any) -> Any:
    """Replacement for a module's `apply_rotary_pos_emb` whose tables have two equal halves."""

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Rotate heads that precede tokens, with tables of both halves and a batch dimension, as in transformers."""
        if (
            args
            or kwargs
            # PyTorch's own operators, as in `own`; which Dynamo would look for under this function's name.
            or (not torch.compiler.is_compiling() and LADDER.is_native("rotary_embedding", q))
            or not _fits(q, cos)
            or (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
        ):
            return own(q, k, cos, sin, *args, **kwargs)
        return _rotated(q, k, cos, sin)

    return apply_rotary_pos_emb


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotary_embedding` of heads before tokens, with tables as transformers has them."""
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    if cos.shape[0] == 1:
        cos, sin = cos[0], sin[0]
    q, k = rotary_embedding(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def _fits(q: Tensor, cos: Tensor) -> bool:
    """Whether a table is one for every token, in a dtype that fits the heads, and as wide as these."""
    return (
        (q.dim(), cos.dim()) == (4, 3)
        and (cos.dtype == q.dtype or (cos.dtype == torch.float32 and _is_rounded_anyway(q)))
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1:] == (q.shape[2], q.shape[3])
    )


def _is_rounded_anyway(q: Tensor) -> bool:
    """Whether attention rounds heads that float32 tables have rotated to the dtype of q, as under autocast to it.

    Not where a compiler traces: TorchInductor fuses that rotation with what is around it.
    """
    device = q.device.type
    if torch.compiler.is_compiling() or not torch.is_autocast_enabled(device):
        return False
    return torch.get_autocast_dtype(device) == q.dtype


def _is_the_same(own: Any) -> bool:
    """Whether a rotation gives what `rotary_embedding` gives, tried on a small input."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 8, dtype=torch.float64, generator=generator) for heads in (4, 2))
    angles = torch.randn(1, 5, 4, dtype=torch.float64, generator=generator).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    try:
        given = own(q, k, cos, sin)
        return _fits(q, cos) and all(
            patching.agree(a, b, 1e-9) for a, b in zip(_rotated(q, k, cos, sin), given, strict=True)
        )
    except Exception:  # it takes other arguments
        return False


def _with_globals(function: Any, replaced: dict[str, Any]) -> Any:
    """The same code, which finds other functions under these names; None if that is not known of a wrapper in it."""
    if not isinstance(function, FunctionType):
        return None
    inner, globals_of, cells = getattr(function, "__wrapped__", None), function.__globals__, function.__closure__
    if inner is None:
        globals_of = {**globals_of, **replaced}
        globals_of.pop("__name__", None)  # by which Dynamo would look for `replaced` in the module itself
    else:
        new = _with_globals(inner, replaced)
        if new is None or not any(_holds(cell, inner) for cell in cells or ()):
            return None
        cells = tuple(CellType(new) if _holds(cell, inner) else cell for cell in cells or ())
    found = FunctionType(function.__code__, globals_of, function.__name__, function.__defaults__, cells)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


def _holds(cell: CellType, function: Any) -> bool:
    """Whether this is what a closure holds; a cell may be empty."""
    try:
        return cell.cell_contents is function
    except ValueError:
        return False
