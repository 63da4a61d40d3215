"""The operators `torch.ops.kernel_pytorch.{linear_cross_entropy, cross_entropy}`, their backwards, and `check_target`.

They return the loss of each token, and for the backward `normalizer`, `(..., 2)`: its largest logit, and the logarithm
of the sum of exponentials relative to that. (Their sum is the logarithm of the sum of exponentials, which has fewer
digits the larger the logits are.) What is made of losses is left to PyTorch's operators. Registering them is what lets
torch.compile, export, checkpointing and DTensor see one node instead of Python, at level "native" too, which would
otherwise be a graph of chunks. The implementations import Triton when they are called, never before: a fresh process
whose first call is compiled with `fullgraph=True` works, and importing this package does not import Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import sharding
from .chunks import counted, wide_dtype
from .direct_calls import check_count, check_floats, check_memory

OPERATOR_LEVELS = ("native", "triton")
TARGETS = (torch.int64, torch.int32)

library = torch.library.Library("kernel_pytorch", "FRAGMENT")
_SCALARS = "SymInt ignore_index, float label_smoothing, float z_loss, float softcap"
library.define(
    f"linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, {_SCALARS}, SymInt chunk,"
    " str level) -> (Tensor loss, Tensor normalizer)"
)
library.define(
    "linear_cross_entropy_backward(Tensor dloss, Tensor normalizer, Tensor hidden, Tensor weight, Tensor target,"
    f" Tensor? bias, {_SCALARS}, SymInt chunk, str level, bool need_dhidden, bool need_dweight, bool need_dbias)"
    " -> (Tensor dhidden, Tensor dweight, Tensor dbias)"
)
library.define(
    f"cross_entropy(Tensor logits, Tensor target, {_SCALARS}, str level) -> (Tensor loss, Tensor normalizer)"
)
library.define(
    "cross_entropy_backward(Tensor dloss, Tensor normalizer, Tensor logits, Tensor target,"
    f" {_SCALARS}, str level) -> Tensor"
)
library.define("check_target(Tensor target, SymInt words, SymInt ignore_index) -> Tensor")


# Implementations. Whoever calls an operator directly passes no other check: a wrong shape would read foreign memory.


def _check(rows: Tensor, target: Tensor, level: str) -> None:
    if level not in OPERATOR_LEVELS:
        raise ValueError(f"level: given {level!r}; allowed are {', '.join(map(repr, OPERATOR_LEVELS))}")
    check_floats(rows=rows)
    if target.dtype not in TARGETS:
        raise TypeError(f"target: dtype is {target.dtype}; allowed are torch.int64, torch.int32")
    if target.shape != rows.shape[:-1]:
        raise ValueError(f"target: shape is {tuple(target.shape)}; it must be {tuple(rows.shape[:-1])}")
    check_memory("target", target)


def _check_parameters(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        shape = tuple(weight.shape)
        raise ValueError(f"weight: shape is {shape}; it must have two dimensions, the last {hidden.shape[-1]}")
    if weight.dtype != hidden.dtype:
        raise TypeError(f"weight: dtype is {weight.dtype}; it must be that of hidden, {hidden.dtype}")
    check_floats(weight=weight, bias=bias)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: shape is {tuple(bias.shape)}; it must be {tuple(weight.shape[:1])}")


def _check_of_tokens(dloss: Tensor, normalizer: Tensor, target: Tensor) -> None:
    check_floats(dloss=dloss, normalizer=normalizer)
    check_count(target.numel(), dloss=dloss)
    check_count(2 * target.numel(), normalizer=normalizer)


def _without_autocast(x: Tensor) -> torch.autocast:
    """Products inside an operator are what they are, whatever its caller has switched on."""
    return torch.autocast(x.device.type, enabled=False)


def _of_tokens(found: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of each row in the shape of the target, and no views, which nobody could change in place."""
    loss, normalizer = found
    view = torch.ops.aten._unsafe_view
    return view(loss, target.shape), view(normalizer, (*target.shape, 2))


def launch_linear(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    chunk: int,
    level: str,
) -> tuple[Tensor, Tensor]:
    """`(loss, normalizer)` of each token."""
    _check(hidden, target, level)
    _check_parameters(hidden, weight, bias)
    rows, scalars = hidden.reshape(-1, hidden.shape[-1]), (ignore_index, label_smoothing, z_loss, softcap)
    with _without_autocast(hidden):
        if level == "triton":
            from . import triton_forward

            found = triton_forward.forward(rows, weight, target.reshape(-1), bias, *scalars)
        else:
            from . import native

            found = native.forward_linear(rows, weight, target.reshape(-1), bias, *scalars, chunk)
    return _of_tokens(found, target)


def launch_linear_backward(
    dloss: Tensor,
    normalizer: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    chunk: int,
    level: str,
    need_dhidden: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; `(0,)` where not needed."""
    _check(hidden, target, level)
    _check_parameters(hidden, weight, bias)
    _check_of_tokens(dloss, normalizer, target)
    arguments = (
        dloss.reshape(-1), normalizer.reshape(-1, 2), hidden.reshape(-1, hidden.shape[-1]), weight, target.reshape(-1),
        bias, ignore_index, label_smoothing, z_loss, softcap, chunk, need_dhidden, need_dweight,
        need_dbias and bias is not None,
    )  # fmt: skip
    with _without_autocast(hidden):
        if level == "triton":
            from . import triton_backward

            dhidden, dweight, dbias = triton_backward.backward(*arguments)
        else:
            from . import native

            dhidden, dweight, dbias = native.backward_linear(*arguments)
    return dhidden.view(hidden.shape) if need_dhidden else dhidden, dweight, dbias


def launch_logits(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    level: str,
) -> tuple[Tensor, Tensor]:
    """`(loss, normalizer)` of each token."""
    _check(logits, target, level)
    rows, scalars = logits.reshape(-1, logits.shape[-1]), (ignore_index, label_smoothing, z_loss, softcap)
    with _without_autocast(logits):
        if level == "triton":
            from . import triton_logits

            found = triton_logits.forward(rows, target.reshape(-1), *scalars)
        else:
            from . import native

            found = native.forward_logits(rows, target.reshape(-1), *scalars)
    return _of_tokens(found, target)


def launch_logits_backward(
    dloss: Tensor,
    normalizer: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    level: str,
    inplace: bool = False,
) -> Tensor:
    """The gradient of logits, contiguous; with `inplace`, which the operator does not have, the logits themselves."""
    _check(logits, target, level)
    _check_of_tokens(dloss, normalizer, target)
    result = logits if inplace else torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if logits.numel() == 0:
        return result
    rows = logits.reshape(-1, logits.shape[-1])
    in_rows = rows if inplace else result.view(rows.shape)
    arguments = dloss.reshape(-1), rows, target.reshape(-1), normalizer.reshape(-1, 2)
    scalars = ignore_index, label_smoothing, z_loss, softcap
    with _without_autocast(logits):
        if level == "triton":
            from . import triton_logits

            triton_logits.backward(*arguments, *scalars, in_rows)
        else:
            from . import native

            native.backward_logits(*arguments, *scalars, in_rows)
    if inplace:
        if in_rows.data_ptr() != logits.data_ptr():  # no view of these logits has rows
            logits.copy_(in_rows.view(logits.shape))
        torch.autograd.graph.increment_version(logits)
    return result


def raise_for_target(target: Tensor, words: int, ignore_index: int) -> None:
    """Raise IndexError, naming the first one and its place, unless every target is a word or to be ignored.

    A GPU is waited for.
    """
    wrong = ~counted(target, words, ignore_index) & (target.to(torch.int64) != ignore_index)
    if not wrong.any():
        return
    place = tuple(wrong.nonzero()[0].tolist())
    allowed = f"allowed are 0 to {words - 1}, and ignore_index {ignore_index}"
    raise IndexError(f"target: {int(target[place])} at position {place}; {allowed}")


def check_target(target: Tensor, words: int, ignore_index: int) -> Tensor:
    """A copy of the target, or IndexError: an operator, so that a compiled graph checks what it is given."""
    raise_for_target(target, words, ignore_index)
    return target.clone(memory_format=torch.contiguous_format)


for _name, _launcher in (
    ("linear_cross_entropy", launch_linear),
    ("linear_cross_entropy_backward", launch_linear_backward),
    ("cross_entropy", launch_logits),
    ("cross_entropy_backward", launch_logits_backward),
    ("check_target", check_target),
):
    library.impl(_name, _launcher, "CompositeExplicitAutograd")


# Fakes: exactly what the launchers allocate, contiguous whatever the strides of the inputs.


@torch.library.register_fake("kernel_pytorch::linear_cross_entropy", lib=library)
def _(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *scalars: Any) -> tuple[Tensor, Tensor]:
    return _fake_losses(hidden)


@torch.library.register_fake("kernel_pytorch::linear_cross_entropy_backward", lib=library)
def _(
    dloss: Tensor,
    normalizer: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    chunk: int,
    level: str,
    need_dhidden: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    like_bias = weight if bias is None else bias
    return (
        hidden.new_empty(hidden.shape if need_dhidden else (0,)),
        weight.new_empty(weight.shape if need_dweight else (0,)),
        like_bias.new_empty(weight.shape[:1] if need_dbias and bias is not None else (0,)),
    )


@torch.library.register_fake("kernel_pytorch::cross_entropy", lib=library)
def _(logits: Tensor, target: Tensor, *scalars: Any) -> tuple[Tensor, Tensor]:
    return _fake_losses(logits)


@torch.library.register_fake("kernel_pytorch::cross_entropy_backward", lib=library)
def _(dloss: Tensor, normalizer: Tensor, logits: Tensor, target: Tensor, *scalars: Any) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake("kernel_pytorch::check_target", lib=library)
def _(target: Tensor, words: int, ignore_index: int) -> Tensor:
    return target.new_empty(target.shape)


def _fake_losses(rows: Tensor) -> tuple[Tensor, Tensor]:
    wide, tokens = wide_dtype(rows.dtype), rows.shape[:-1]
    return rows.new_empty(tokens, dtype=wide), rows.new_empty((*tokens, 2), dtype=wide)


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


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements may share memory, as those of an expanded tensor do: then it cannot be written in place."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def below_autograd(
    operator: Any, launcher: Callable[..., Any], tensors: tuple[Tensor | None, ...], *scalars: Any
) -> Any:
    """Run an operator from inside its own autograd function: the launcher itself where `is_plain` allows it."""
    if is_plain(*tensors):
        return launcher(*tensors, *scalars)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*tensors, *scalars)
