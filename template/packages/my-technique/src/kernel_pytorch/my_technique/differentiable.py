"""Autograd functions of one's own, called with little beside them: that can take longer than a small kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def differentiable(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply`, by the shortest way: past autograd where there is no gradient to take.

    `Function.apply` looks at the signature of `forward` in every call, to fill in arguments that are not given.

    Args:
        function: whose `forward` and `setup_context` are two static methods. What `forward` returns is no argument.

    Returns:
        A function of the arguments of `forward`, by position, to register for the dispatch key "Autograd" too.
    """
    parameters = inspect.signature(function.forward).parameters.values()
    defaults = tuple(p.default for p in parameters if p.default is not p.empty)
    required = len(parameters) - len(defaults)
    with_graph = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def run(*arguments: Any) -> Any:
        if len(arguments) < required or has_transform() or torch._C._get_tracing_state() is not None:
            return function.apply(*arguments)  # which says what it does not support, and is one node of a trace
        arguments = tuple(_alive(a) if isinstance(a, Tensor) else a for a in arguments)
        arguments += defaults[len(arguments) - required :]
        return with_graph(*arguments) if wants_graph(*arguments) else function.forward(*arguments)

    return run


# A tensor that outlives the transform of torch.func that it was made in is wrapped for it still.
_alive = torch._C._functorch.unwrap_if_dead


def wants_graph(*values: Any) -> bool:
    """Whether what is computed of these, of which some are tensors, is to be differentiated."""
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values)


def is_transformed() -> bool:
    """Whether a transform of torch.func is at work, vmap for example, or forward-mode differentiation.

    Kernels of one's own have no rules for those. What torch.compile traces says no: it may not ask.
    """
    return not torch.compiler.is_compiling() and has_transform()


def has_transform() -> bool:
    """The same, for what is not traced."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
