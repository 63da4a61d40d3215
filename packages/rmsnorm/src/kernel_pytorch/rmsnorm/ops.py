"""The operators `torch.ops.kernel_pytorch.{rms_norm, add_rms_norm, rms_norm_backward}`.

Registering a kernel is what lets torch.compile, export, checkpointing and DTensor see one node instead of Python. The
implementations import Triton when they are called, never before: a fresh process whose first call is compiled with
`fullgraph=True` works, and importing this package does not import Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import sharding
from .direct_calls import check_count, check_floats, check_shapes

library = torch.library.Library("kernel_pytorch", "FRAGMENT")
library.define("rms_norm(Tensor x, Tensor? weight, float eps, float offset, str casting) -> (Tensor y, Tensor rstd)")
library.define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str casting)"
    " -> (Tensor y, Tensor h, Tensor rstd)"
)
library.define(
    "rms_norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor rstd, float eps, float offset,"
    " bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)"
)


def result_dtype(x_dtype: torch.dtype, weight: Tensor | None, casting: str) -> torch.dtype:
    """The dtype of y, as `reference.py` defines it."""
    if weight is None or casting == "gemma":
        return x_dtype
    return torch.promote_types(x_dtype, weight.dtype)


# Implementations: the same launcher on the GPU and, under Triton's interpreter, on the CPU.


def _check(x: Tensor, weight: Tensor | None, casting: str) -> None:
    """Whoever calls an operator directly passes no other check, and a wrong shape would read foreign memory."""
    if casting not in ("llama", "gemma", "none"):
        raise ValueError(f"casting: given {casting!r}; allowed are 'llama', 'gemma', 'none'")
    check_floats(x=x, weight=weight)
    if weight is not None and (weight.dim() not in (1, 2) or weight.shape != x.shape[-weight.dim() :]):
        raise ValueError(f"weight: shape is {tuple(weight.shape)}; it must be the end of that of x, {tuple(x.shape)}")


def launch_forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> tuple[Tensor, Tensor]:
    """`(y, rstd)` from the Triton kernel."""
    from . import triton_forward

    _check(x, weight, casting)
    y, _, rstd = triton_forward.forward(x, None, weight, eps, offset, casting)
    return y, rstd


def launch_add_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`(y, h, rstd)` from the Triton kernel."""
    from . import triton_forward

    _check(x, weight, casting)
    check_floats(residual=residual)
    check_shapes(x.shape, residual=residual)
    return triton_forward.forward(x, residual, weight, eps, offset, casting)


def launch_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    """`(dx, dweight)` from the Triton kernels; what is not needed comes back empty. `eps` went into `rstd`."""
    from . import triton_backward

    _check(h, weight, "llama")
    check_floats(dy=dy, dh=dh, rstd=rstd)
    check_shapes(h.shape, dy=dy, dh=dh)
    check_count(h.shape[:-1].numel(), rstd=rstd)
    return triton_backward.backward(dy, dh, h, weight, rstd, offset, need_dx, need_dweight)


for _name, _launcher in (
    ("rms_norm", launch_forward),
    ("add_rms_norm", launch_add_forward),
    ("rms_norm_backward", launch_backward),
):
    library.impl(_name, _launcher, "CUDA")
    library.impl(_name, _launcher, "CPU")


# Fakes: exactly what the launchers allocate, contiguous whatever the strides of the inputs.


@torch.library.register_fake("kernel_pytorch::rms_norm", lib=library)
def _(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=result_dtype(x.dtype, weight, casting))
    return y, x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))


@torch.library.register_fake("kernel_pytorch::add_rms_norm", lib=library)
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    h = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y, rstd = torch.ops.kernel_pytorch.rms_norm(h, weight, eps, offset, casting)
    return y, h, rstd


@torch.library.register_fake("kernel_pytorch::rms_norm_backward", lib=library)
def _(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    dx = h.new_empty(h.shape if need_dx else (0,))
    if weight is None:
        return dx, h.new_empty((0,), dtype=rstd.dtype)
    return dx, weight.new_empty(weight.shape if need_dweight else (0,))


sharding.register_when_distributed()


# Dispatch.


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
