"""Tensors among the arguments and results of a call, and copies of arguments that receive gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class EveryCall(TorchDispatchMode):
    """A mode that calls `note(operator, args, kwargs)` before each operator runs."""

    def __init__(self, note: Callable[[Any, tuple[Any, ...], dict[str, Any]], object]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def is_float(argument: object) -> TypeGuard[Tensor]:
    """Whether an argument is a floating-point tensor, which can have a gradient."""
    return isinstance(argument, Tensor) and argument.is_floating_point()


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a function that returns one tensor or several. Timed calls contain it, so it is cheap."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def leaves(arguments: Sequence[Any], wanted: bool | Sequence[bool] = True, *, copy: bool = False) -> list[Any]:
    """Detach every floating-point tensor, as a leaf that receives a gradient; leave other arguments as they are.

    Args:
        arguments: tensors and plain values.
        wanted: whether the tensors require gradients: all of them, or one answer for each argument.
        copy: give them separate memory.
    """
    wants = [wanted] * len(arguments) if isinstance(wanted, bool) else wanted
    own = [a.detach().clone() if copy and is_float(a) else a for a in arguments]
    return [a.detach().requires_grad_(w) if is_float(a) else a for a, w in zip(own, wants, strict=True)]


def wanting(arguments: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among the arguments that require gradients."""
    return [a for a in arguments if isinstance(a, Tensor) and a.requires_grad]
