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
