"""Level "compile": what TorchInductor makes of a function, the first time it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIMITS = ("recompile_limit", "accumulated_recompile_limit")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the same positional arguments, compiled whole: a graph break is an error, never a fall back.

    While PyTorch traces, the result calls the function itself, which is compiled then. At PyTorch's recompile limit the
    error says what to do.
    """
    made: Callable[..., Any] | None = None

    def call(*arguments: Any) -> Any:
        nonlocal made
        if torch.compiler.is_compiling():
            return function(*arguments)
        if made is None:
            made = torch.compile(function, fullgraph=True)
        try:
            return made(*arguments)
        except Exception as error:
            if type(error).__name__ != "FailOnRecompileLimitHit":  # importing its module imports all of Dynamo
                raise
            # The error does not say which of the two it was; one function alone meets the lower first.
            limit, name = min((getattr(torch._dynamo.config, name), name) for name in LIMITS)
            raise RuntimeError(
                f"level 'compile' of {function.__name__} cannot run here: PyTorch compiles a function anew for every "
                f"dtype, rank, option and the like, but at most {limit} times in a process; raise torch._dynamo.config."
                f"{name}, or forget what was compiled by torch._dynamo.reset()"
            ) from error

    return call
