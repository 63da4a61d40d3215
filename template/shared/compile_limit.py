"""Level "compile" where PyTorch compiles no more of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIMITS = ("recompile_limit", "accumulated_recompile_limit")


def limited(function: str, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile made of a function, whose error says what to do where PyTorch compiles no more of it."""

    def call(*arguments: Any) -> Any:
        try:
            return compiled(*arguments)
        except Exception as error:
            if type(error).__name__ != "FailOnRecompileLimitHit":  # importing its module imports all of Dynamo
                raise
            # The error does not say which of the two it was; one function alone meets the lower first.
            limit, name = min((getattr(torch._dynamo.config, name), name) for name in LIMITS)
            raise RuntimeError(
                f"level 'compile' of {function} cannot run here: PyTorch compiles a function anew for every dtype, "
                f"rank, option and the like, but at most {limit} times in a process; raise torch._dynamo.config."
                f"{name}, or forget what was compiled by torch._dynamo.reset()"
            ) from error

    return call
