"""Functions of a level that are one call of an operator.

    @calls(operators.norm_act, first)
    def layer_norm(x, weight, bias, eps):      # returns the operator's arguments
        return x, None, weight, bias, None, eps, 0.0, "layer", "identity"

A `Ladder` compares each call with those before it (`call_cache.py`). The operator would compare the same tensors and
scalars once more, so for matching calls the ladder calls what `bind` returns, which compares nothing: that saves a
microsecond or two of host time a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def calls(
    run: Any, result: Callable[[Any], Any] | None = None
) -> Callable[[Callable[..., tuple[Any, ...]]], Callable[..., Any]]:
    """Make a level's function of one that returns the arguments of an operator.

    Args:
        run: what `declare` returned.
        result: makes the function's result of the operator's; None if they are the same.

    The function that is decorated may pass on tensors that it was given, and values that follow from its other
    arguments; it makes no tensors, and decides nothing by the numbers in them.
    """

    def decorate(arguments_of: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
        @functools.wraps(arguments_of)
        def function(*arguments: Any) -> Any:
            found = run(*arguments_of(*arguments))
            return found if result is None else result(found)

        def bound(*arguments: Any) -> Callable[..., Any]:
            run_alike = run.bound(arguments_of(*arguments), result)
            return lambda *arguments: run_alike(*arguments_of(*arguments))

        function.bound = bound  # type: ignore[attr-defined]
        return function

    return decorate


def bind(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """The function for calls that match one with these arguments, outside of traces and transforms of torch.func."""
    bound: Callable[..., Callable[..., Any]] | None = getattr(function, "bound", None)
    return function if bound is None else bound(*arguments)


def first(results: tuple[Any, ...]) -> Any:
    """The first result of an operator."""
    return results[0]


def first_two(results: tuple[Any, ...]) -> tuple[Any, Any]:
    """The first two results of an operator."""
    return results[0], results[1]
