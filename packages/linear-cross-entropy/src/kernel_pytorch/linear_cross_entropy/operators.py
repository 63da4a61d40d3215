"""The operators of levels "native" and "triton", each declared once, and `check_target`.

They return the loss of each token, and for the backward `normalizer`, `(..., 2)`: its largest logit, and the logarithm
of the sum of exponentials relative to that. (Their sum is the logarithm of the sum of exponentials, which has fewer
digits the larger the logits are.) What is made of losses is left to PyTorch's operators. Level "native" is an operator
too, so that torch.compile, export, checkpointing and DTensor see one node, and not a graph of chunks. Saved for the
backward, beside the inputs: two numbers a token. Where gradients are to be differentiated again (`create_graph=True`)
they are computed by plain PyTorch that autograd can follow, and that holds all logits.

Tokens are independent: DTensor may shard hidden states, logits and targets over every dimension of tokens, with
replicated parameters, and nothing is sent. Losses, and what is kept for the backward, are sharded like the tokens, and
each rank holds its own tokens' part of the gradients of weight and bias. A weight that is sharded over the vocabulary,
or over the hidden dimension, is gathered first, by DTensor, and so are logits sharded over the vocabulary: the sum of
exponentials would have to be sent between ranks, which these operators do not do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ._core.operator import declare, is_plain, per_element, wants_graph, with_gradient
from .kernels.chunks import counted, wide_dtype

Shardings = Iterator[tuple[list[Any], list[Any]]]
"""Acceptable placements of the outputs, then of the tensors that go in."""

ANYWHERE = ("CompositeExplicitAutograd",)  # level "native" is made of PyTorch's operators
SCALARS = "SymInt ignore_index, float label_smoothing, float z_loss, float softcap"
LOSSES = "(Tensor loss, Tensor normalizer)"
# FLOPs of a logit: exponential, sums and comparison forward; exponential, difference and products backward.
FORWARD, BACKWARD = 4, 5


def fake(rows: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """What both forwards allocate, for each of the rows."""
    wide, tokens = wide_dtype(rows.dtype), rows.shape[:-1]
    return rows.new_empty(tokens, dtype=wide), rows.new_empty((*tokens, 2), dtype=wide)


def placed(dtensor: Any, dimensions: int) -> Iterator[tuple[Any, Any]]:
    """Placements of what has so many dimensions of tokens, and of a sum over them."""
    yield dtensor.Replicate(), dtensor.Replicate()
    for dimension in range(dimensions):
        yield dtensor.Shard(dimension), dtensor.Partial()


# The gradient of logits.


def launch_backward() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import launchers

    return launchers.cross_entropy_backward


def fake_backward(dloss: Tensor, normalizer: Tensor, logits: Tensor, *arguments: Any) -> Tensor:
    """What it allocates: contiguous whatever the strides of the logits."""
    return logits.new_empty(logits.shape)


def formula(dloss: Tensor, normalizer: Tensor, logits: Tensor, target: Tensor, *scalars: Any) -> Tensor:
    """The same in PyTorch that autograd can follow."""
    return _gradient_of(logits.to(wide_dtype(logits.dtype)), dloss, target, *scalars[:4]).to(logits.dtype)


def flops_backward(dloss: Any, normalizer: Any, logits: Any, *_: Any, **__: Any) -> int:
    """What is made of each logit."""
    return BACKWARD * torch.Size(logits).numel()


def placements_backward(dtensor: Any, dloss: Any, normalizer: Any, logits: Any, *arguments: Any) -> Shardings:
    """Where what goes in and the gradient of the logits may lie."""
    for tokens, _ in placed(dtensor, logits.ndim - 1):
        yield [tokens], [tokens] * 4


cross_entropy_backward = declare(
    f"cross_entropy_backward(Tensor dloss, Tensor normalizer, Tensor logits, Tensor target, {SCALARS}, str level)"
    " -> Tensor",
    launch=launch_backward,
    fake=fake_backward,
    formula=formula,
    keys=ANYWHERE,
    flops=flops_backward,
    sharding=placements_backward,
)


def _gradient_of(
    logits: Tensor,
    dloss: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    """The gradient of logits `(..., V)`, wide, in differentiable PyTorch."""
    words = logits.shape[-1]
    counts = counted(target, words, ignore_index)
    logits = logits.masked_fill(~counts[..., None], 0.0)  # NaN would stay NaN, times zero
    z = softcap * torch.tanh(logits / softcap) if softcap > 0.0 else logits
    at_target = torch.arange(words, device=z.device) == target[..., None]
    gradient = torch.softmax(z, -1)
    if z_loss > 0.0:
        gradient = gradient * (1.0 + 2.0 * z_loss * torch.logsumexp(z, -1, keepdim=True))
    gradient = gradient - (1.0 - label_smoothing) * at_target - label_smoothing / words
    gradient = gradient * torch.where(counts, dloss, 0.0)[..., None]
    return gradient * (1.0 - (z / softcap).square()) if softcap > 0.0 else gradient


# Of logits.


def launch() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import launchers

    return launchers.cross_entropy


def gradient(
    dloss: Tensor,
    normalizer: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    level: str,
) -> tuple[Tensor, None]:
    """Of the logits."""
    scalars = ignore_index, label_smoothing, z_loss, softcap, level
    return cross_entropy_backward(dloss, normalizer, logits, target, *scalars), None


def gradient_in_place(
    dloss: Tensor,
    normalizer: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    level: str,
) -> tuple[Tensor, None]:
    """Of the logits, written over them where nothing is in the way."""
    arguments = dloss, normalizer, logits, target, ignore_index, label_smoothing, z_loss, softcap, level
    if not is_plain(*arguments[:4]) or wants_graph(*arguments) or overlaps_itself(logits):
        return cross_entropy_backward(*arguments), None
    found: Tensor = launch_backward()(*arguments, True)
    return found.detach(), None


def placements(dtensor: Any, logits: Any, *arguments: Any) -> Shardings:
    """Where what goes in and the losses may lie."""
    for tokens, _ in placed(dtensor, logits.ndim - 1):
        yield [tokens] * 2, [tokens] * 2


cross_entropy = declare(
    f"cross_entropy(Tensor logits, Tensor target, {SCALARS}, str level) -> {LOSSES}",
    launch=launch,
    fake=fake,
    gradient=gradient,
    keys=ANYWHERE,
    flops=per_element(FORWARD),
    sharding=placements,
)
cross_entropy_in_place = with_gradient(cross_entropy, gradient_in_place)


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements may share memory, as those of an expanded tensor do: then it cannot be written in place."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


# The gradients of a linear layer.


def launch_linear_backward() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import launchers

    return launchers.linear_cross_entropy_backward


def fake_linear_backward(
    dloss: Tensor, normalizer: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    need_dhidden, need_dweight, need_dbias = rest[-3:]
    like_bias = weight if bias is None else bias
    return (
        hidden.new_empty(hidden.shape if need_dhidden else (0,)),
        weight.new_empty(weight.shape if need_dweight else (0,)),
        like_bias.new_empty(weight.shape[:1] if need_dbias and bias is not None else (0,)),
    )


def formula_linear(
    dloss: Tensor, normalizer: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in PyTorch that autograd can follow, with all logits."""
    need_dhidden, need_dweight, need_dbias = rest[-3:]
    wide = wide_dtype(hidden.dtype)
    data, matrix = hidden.to(wide), weight.to(wide)
    logits = data @ matrix.t()
    logits = logits if bias is None else logits + bias.to(wide)
    found = _gradient_of(logits, dloss, target, *rest[:4])
    rows = found.reshape(-1, found.shape[-1])
    like_bias = weight if bias is None else bias
    return (
        (found @ matrix).to(hidden.dtype) if need_dhidden else hidden.new_empty((0,)),
        (rows.t() @ data.reshape(-1, data.shape[-1])).to(weight.dtype) if need_dweight else weight.new_empty((0,)),
        rows.sum(0).to(like_bias.dtype) if need_dbias and bias is not None else like_bias.new_empty((0,)),
    )


def flops_linear_backward(dloss: Any, normalizer: Any, hidden: Any, weight: Any, *rest: Any, **__: Any) -> int:
    """The product again, and one for each of the two gradients that are products."""
    need_dhidden, need_dweight, _ = rest[-3:]
    return _logits(hidden, weight) * (2 * weight[1] * (1 + need_dhidden + need_dweight) + BACKWARD)


def placements_linear_backward(
    dtensor: Any, dloss: Any, normalizer: Any, hidden: Any, weight: Any, target: Any, bias: Any, *rest: Any
) -> Shardings:
    """Where what goes in and the gradients may lie."""
    need_dhidden, need_dweight, need_dbias = rest[-3:]
    replicate = dtensor.Replicate()  # what is not needed comes back empty, and is the same everywhere
    for tokens, total in placed(dtensor, hidden.ndim - 1):
        outputs = [
            tokens if need_dhidden else replicate,
            total if need_dweight else replicate,
            total if need_dbias and bias is not None else replicate,
        ]
        yield outputs, [tokens, tokens, tokens, replicate, tokens, None if bias is None else replicate]


linear_cross_entropy_backward = declare(
    "linear_cross_entropy_backward(Tensor dloss, Tensor normalizer, Tensor hidden, Tensor weight, Tensor target,"
    f" Tensor? bias, {SCALARS}, SymInt chunk, str level, bool need_dhidden, bool need_dweight, bool need_dbias)"
    " -> (Tensor dhidden, Tensor dweight, Tensor dbias)",
    launch=launch_linear_backward,
    fake=fake_linear_backward,
    formula=formula_linear,
    keys=ANYWHERE,
    flops=flops_linear_backward,
    sharding=placements_linear_backward,
)


def _logits(hidden: Any, weight: Any) -> int:
    """How many there are, of shapes."""
    return torch.Size(hidden[:-1]).numel() * int(weight[0])


# Of a linear layer.


def launch_linear() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import launchers

    return launchers.linear_cross_entropy


def gradient_linear(
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
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, None, Tensor]:
    """Of hidden, weight and bias."""
    need_dhidden, need_dweight, _, need_dbias = needs
    dhidden, dweight, dbias = linear_cross_entropy_backward(
        dloss, normalizer, hidden, weight, target, bias, ignore_index, label_smoothing, z_loss, softcap, chunk, level,
        need_dhidden, need_dweight, need_dbias,
    )  # fmt: skip
    return dhidden, dweight, None, dbias


def flops_linear(hidden: Any, weight: Any, *_: Any, **__: Any) -> int:
    """A product, and what is made of each logit."""
    return _logits(hidden, weight) * (2 * int(weight[1]) + FORWARD)


def placements_linear(dtensor: Any, hidden: Any, weight: Any, target: Any, bias: Any, *scalars: Any) -> Shardings:
    """Where what goes in and the losses may lie."""
    replicate = dtensor.Replicate()
    for tokens, _ in placed(dtensor, hidden.ndim - 1):
        yield [tokens] * 2, [tokens, replicate, tokens, None if bias is None else replicate]


linear_cross_entropy = declare(
    f"linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, {SCALARS}, SymInt chunk,"
    f" str level) -> {LOSSES}",
    launch=launch_linear,
    fake=fake,
    gradient=gradient_linear,
    keys=ANYWHERE,
    flops=flops_linear,
    sharding=placements_linear,
)


# Targets.


def launch_check() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import launchers

    return launchers.check_target


def fake_check(target: Tensor, words: int, ignore_index: int) -> Tensor:
    """What it allocates."""
    return target.new_empty(target.shape)


def placements_check(dtensor: Any, target: Any, words: int, ignore_index: int) -> Shardings:
    """Where the target and its copy may lie."""
    for tokens, _ in placed(dtensor, target.ndim):
        yield [tokens], [tokens]


check_target = declare(
    "check_target(Tensor target, SymInt words, SymInt ignore_index) -> Tensor",
    launch=launch_check,
    fake=fake_check,
    keys=ANYWHERE,
    sharding=placements_check,
)
