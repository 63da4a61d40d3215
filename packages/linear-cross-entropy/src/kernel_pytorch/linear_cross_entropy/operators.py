"""The operators of levels "native" and "triton", of one schema each, and `check_target`.

Level "native" is an operator too, so that torch.compile, export, checkpointing and DTensor see one node, and not a
graph of chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ._core.call_kinds import can_bypass_dispatcher, is_transformed, needs_grad
from ._core.gradients import asks, frees_graph, is_batched
from ._core.operator import NATIVE, TRITON, declare, like_first, with_gradient
from ._core.sharding import Shardings
from .rules.cross_entropy import CROSS_ENTROPY_BACKWARD_RULES, CROSS_ENTROPY_RULES
from .rules.linear_cross_entropy import (
    LINEAR_CROSS_ENTROPY_BACKWARD_RULES,
    LINEAR_CROSS_ENTROPY_RULES,
    LINEAR_CROSS_ENTROPY_WITH_GRADIENTS_RULES,
    gradient_with_gradients,
)

SCALE = "scale_gradient(Tensor gradient, Tensor factor, Tensor like) -> Tensor"
ANYWHERE = ("CompositeExplicitAutograd",)  # level "native" is made of PyTorch's operators


class Operators(NamedTuple):
    """Operators of one level.

    `cross_entropy_in_place` is `cross_entropy` with a gradient that overwrites the logits. Callers may use only the
    loss that `linear_cross_entropy_with_gradients` returns: backward overwrites its other outputs.
    """

    cross_entropy_backward: Callable[..., Any]
    cross_entropy: Callable[..., Any]
    cross_entropy_in_place: Callable[..., Any]
    linear_cross_entropy_backward: Callable[..., Any]
    linear_cross_entropy: Callable[..., Any]
    linear_cross_entropy_with_gradients: Callable[..., Any]


def launcher(name: str, level: str) -> Callable[..., Any]:
    """The launcher of an operator at a level."""
    from .kernels import launchers

    return getattr(launchers, name)(level)


def declared(level: str, space: str) -> Operators:
    """Declare the operators of a level in its namespace."""

    def of(name: str) -> Any:
        return {"launch": functools.partial(launcher, name, level), "keys": ANYWHERE, "space": space}

    backward = declare(**CROSS_ENTROPY_BACKWARD_RULES, **of("cross_entropy_backward"))
    logits = declare(**CROSS_ENTROPY_RULES, **of("cross_entropy"), backward=backward)
    linear_backward = declare(**LINEAR_CROSS_ENTROPY_BACKWARD_RULES, **of("linear_cross_entropy_backward"))
    linear = declare(**LINEAR_CROSS_ENTROPY_RULES, **of("linear_cross_entropy"), backward=linear_backward)
    scale = declare(SCALE, **of("scale_gradient"), fake=fake_scale, formula=scale_formula)
    together = declare(
        **LINEAR_CROSS_ENTROPY_WITH_GRADIENTS_RULES,
        **of("linear_cross_entropy_with_gradients"),
        backward=functools.partial(scaled, scale),
    )
    in_place = with_gradient(logits, gradient_in_place, backward=functools.partial(overwrite, backward, level))
    once = with_gradient(
        together,
        gradient_with_gradients,
        backward=functools.partial(scaled_in_place, scale, level),
        held=("dhidden", "dweight", "dbias"),
    )
    return Operators(backward, logits, in_place, linear_backward, linear, once)


def scaled_in_place(scale: Callable[..., Tensor], level: str, gradient: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    """Compute `scaled`, in place if the gradient is not needed again: the weight has a gradient as large as itself."""
    may = gradient.dtype == like.dtype and gradient.is_contiguous() and can_bypass_dispatcher(gradient, factor, like)
    if may and frees_graph() and not is_batched(factor):
        return launcher("scale_gradient", level)(gradient, factor, like, True)
    return scaled(scale, gradient, factor, like)


def scaled(scale: Callable[..., Tensor], gradient: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    """`gradient * factor` in the dtype of `like`; written out where it is traced, so that a compiler can fuse it."""
    # A mode that only watches sees the operator.
    if type(gradient) is Tensor and not is_transformed() and not is_batched(factor):
        return scale(gradient, factor, like)
    return scale_formula(gradient, factor, like)


def fake_scale(gradient: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    """What it allocates."""
    return gradient.new_empty(gradient.shape, dtype=like.dtype)


def scale_formula(gradient: Tensor, factor: Tensor, like: Tensor) -> Tensor:
    """The same in PyTorch. On a GPU a factor without dimensions is rounded to the dtype of the gradient first."""
    return (gradient * factor.reshape(1)).to(like.dtype)


@asks("overwrite dloss normalizer logits target ignore_index label_smoothing z_loss softcap")
def gradient_in_place(overwrite: Callable[..., Tensor], *given: Any) -> tuple[Tensor, None]:
    """Gradient of the logits, written over them where `overwrite` can."""
    return overwrite(*given), None


def overwrite(
    backward: Callable[..., Tensor], level: str, dloss: Tensor, normalizer: Tensor, logits: Tensor, *others: Any
) -> Tensor:
    """Write the gradient of the logits over them; allocate it if they are traced, shared or differentiated again."""
    arguments = dloss, normalizer, logits, *others
    if not can_bypass_dispatcher(*arguments[:4]) or needs_grad(*arguments) or overlaps_itself(logits):
        return backward(*arguments)
    return launcher("cross_entropy_backward", level)(*arguments, True).detach()


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements may share memory, as those of an expanded tensor do: then it cannot be written in place."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


LEVELS = {"native": declared("native", NATIVE), "triton": declared("triton", TRITON)}
"""The operators, by level."""


# Targets.


def sharding_check(placements: Any, target: Any, words: int, ignore_index: int) -> Shardings:
    """Where the target and its copy may lie."""
    for place in (placements.Replicate(), *map(placements.Shard, range(target.ndim))):
        yield [place], [place]


check_target = declare(
    "check_target(Tensor target, SymInt words, SymInt ignore_index) -> Tensor",
    launch=f"{__package__}.kernels.launchers:check_target",
    fake=like_first,
    keys=ANYWHERE,
    sharding=sharding_check,
)
