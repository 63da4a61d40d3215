"""What the operators of all groups share: their library, and the shortcut past the dispatcher.

Registering a kernel is what lets torch.compile, export, checkpointing and DTensor see one node instead of Python. The
implementations import Triton when they are called, never before: a fresh process whose first call is compiled with
`fullgraph=True` works, and importing this package does not import Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

library = torch.library.Library("kernel_pytorch", "FRAGMENT")


def implement(name: str, launcher: Callable[..., Any]) -> None:
    """The same launcher on the GPU and, under Triton's interpreter, on the CPU."""
    library.impl(name, launcher, "CUDA")
    library.impl(name, launcher, "CPU")


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher has nothing to do: plain Tensors and Parameters, no dispatch mode, no functorch transform.

    The shortcut saves microseconds a call; with a subclass (DTensor, FakeTensor) or a mode (FLOP counter, selective
    checkpointing) it would bypass what the user asked for.
    """
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(t is None or type(t) is Tensor or type(t) is torch.nn.Parameter for t in tensors)
    )


def below_autograd(
    operator: Any, launcher: Callable[..., Any], tensors: tuple[Tensor | None, ...], *scalars: Any
) -> Any:
    """Run an operator from inside its own autograd function: the launcher itself where `is_plain` allows it."""
    if is_plain(*tensors):
        return launcher(*tensors, *scalars)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*tensors, *scalars)


def wants_graph(*values: Any) -> bool:
    """Whether what is computed of these, of which some are tensors, is to be differentiated."""
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in values)


def is_transformed() -> bool:
    """Whether a transform of torch.func is at work, vmap for example, or forward-mode differentiation.

    Kernels of one's own have no rules for those.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def apply(function: type[torch.autograd.Function], operator: Any, *arguments: Any) -> Any:
    """Run a function on all of its arguments, with little beside it: that takes longer than a small kernel.

    Args:
        function: whose `forward` is a static method.
        operator: the same function, registered: while torch.compile or export traces, one node of the graph.
        arguments: of `forward`, by position.
    """
    if torch.compiler.is_compiling():
        return operator(*arguments)
    if is_transformed():
        return function.apply(*arguments)  # which says what it does not support
    if not wants_graph(*arguments):
        return function.forward(*arguments)
    # `Function.apply` looks at the signature of `forward` in every call, to fill in arguments that are not given.
    return super(torch.autograd.Function, function).apply(*arguments)
