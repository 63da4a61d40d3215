"""The loss of the next word where every rank has some rows of the head: `vocabulary_parallel_linear_cross_entropy`."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

LOGITS = 2**26  # bytes of logits that are in memory at a time, unless those of one token are more


def vocabulary_parallel_linear_cross_entropy(
    hidden: Tensor, weight: DTensor, target: Tensor, *, ignore_index: int = -100,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:  # fmt: skip
    """Compute `linear_cross_entropy(hidden, head, target)` of a head whose rows lie on several ranks.

    The logits of a rank's own words are computed for some tokens at a time. Ranks exchange three numbers for each
    token: the largest logit, the sum of exponentials and the target's logit. Gradients are computed in the same pass,
    if they are wanted; the backward adds up that of hidden over the ranks. Second derivatives are refused.

    Args:
        hidden: `(..., H)`, floating point, the same on every rank.
        weight: `(V, H)`, the head, in the dtype of hidden, with `Shard(0)` on a mesh of one dimension.
        target: `(...)`, int64 or int32, the same on every rank: from 0 to V - 1, or ignore_index.
        ignore_index: the target of tokens that have no loss and no gradient.
        reduction: "mean" over the tokens that are not ignored, or "sum".

    Returns:
        `()`, the same on every rank, float32 (float64 of float64); zero if all tokens are ignored.

    Raises:
        TypeError, ValueError: weight is no DTensor, or something does not fit; the message names the argument.
        IndexError: a target is neither a word nor ignore_index, on a CPU. Elsewhere, and compiled, such a token is
            ignored.

    Source: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053, section 3.
    """
    _check(hidden, weight, target, reduction)
    mesh, words, flat = weight.device_mesh, weight.shape[0], target.flatten()
    counted, is_word = flat != ignore_index, (flat >= 0) & (flat < words)
    if flat.is_cpu and not torch.compiler.is_compiling() and bool((counted & ~is_word).any()):
        raise IndexError(f"target: it has a value outside of 0 to {words - 1} that is not ignore_index, {ignore_index}")
    counted = counted & is_word
    items = counted.sum().clamp(min=1) if reduction == "mean" else None
    mine = (flat - first_row(words, mesh)).masked_fill(~counted, -1)
    most = -(-words // mesh.size())  # rows of the first rank: ranks must take the same number of tokens
    tokens = max(1, LOGITS // (max(1, most) * torch.promote_types(hidden.dtype, torch.float32).itemsize))
    given = hidden.flatten(0, -2), weight.to_local(), mine, counted, items, mesh.get_group(), tokens
    return _Loss.apply(*given)  # type: ignore[no-any-return]


def vocabulary_parallel_logits(hidden: Tensor, weight: DTensor) -> Tensor:
    """Compute `hidden @ weight.T` of what every rank has and a weight with `Shard(0)`: all of it, on every rank."""
    mesh, whole = weight.device_mesh, torch.empty(*hidden.shape[:-1], weight.shape[0], device="meta")
    logits = F.linear(entering(hidden, mesh), weight.to_local())
    last = Shard(hidden.dim() - 1)  # parts may differ in size: DTensor needs the whole
    found = DTensor.from_local(logits, mesh, [last], run_check=False, shape=whole.shape, stride=whole.stride())
    return found.redistribute(placements=[Replicate()]).to_local()


def entering(x: Tensor, mesh: Any) -> Tensor:
    """Return x, the same on every rank, where ranks begin to differ: the backward adds up their gradients."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def leaving(x: Tensor, mesh: Any) -> Tensor:
    """Add up the parts that ranks have of one tensor; the backward hands its gradient to each."""
    return _Sum.apply(x, mesh.get_group())  # type: ignore[no-any-return]


class _Sum(torch.autograd.Function):
    # DTensor's sum is a view, of which `fully_shard` warns where a layer returns it.
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        found = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None]:
        return incoming, None


def refuse_graph(name: str) -> None:
    """Raise RuntimeError in a backward whose result is to be differentiated again, which would be wrong in silence."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{name}: it has no second derivatives; call backward or grad without create_graph=True")


def first_row(rows: int, mesh: Any) -> int:
    """Return where the rows of this rank begin in a tensor with `Shard(0)`, which `torch.chunk` divides."""
    return min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)


def _check(hidden: Tensor, weight: DTensor, target: Tensor, reduction: str) -> None:
    if not isinstance(weight, DTensor):
        raise TypeError(f"weight: given {type(weight).__name__}; it must be a DTensor, as tensor_parallel makes it")
    if weight.device_mesh.ndim != 1 or weight.placements != (Shard(0),):
        raise ValueError(f"weight: placed as {weight.placements}; it must be Shard(0) on a mesh of one dimension")
    if weight.dim() != 2 or hidden.dim() < 2 or hidden.shape[-1] != weight.shape[1]:
        shapes = f"{tuple(weight.shape)}, of hidden {tuple(hidden.shape)}"
        raise ValueError(f"weight: shape is {shapes}; they must be (V, H) and (..., H) with tokens before H")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"weight: dtype is {weight.dtype}; it must be that of hidden, {hidden.dtype}")
    if target.shape != (shape := hidden.shape[:-1]) or target.dtype not in (torch.int64, torch.int32):
        given = f"{target.dtype} of shape {tuple(target.shape)}"
        raise ValueError(f"target: given {given}; it must be int64 or int32 of shape {tuple(shape)}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: given {reduction!r}; allowed are 'mean', 'sum'")


class _Loss(torch.autograd.Function):
    """The loss of `(T, H)`, with the gradients in the same pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *given: Any) -> Tensor:
        mine, counted, items, group, tokens = given
        wide, wanted = torch.promote_types(hidden.dtype, torch.float32), any(ctx.needs_input_grad)
        scale = hidden.new_ones((), dtype=wide) if items is None else 1 / items.to(wide)
        loss = hidden.new_zeros((), dtype=wide)
        to_hidden = torch.zeros_like(hidden) if wanted else None
        to_weight = torch.zeros_like(weight, dtype=wide) if wanted else None
        for start in range(0, len(hidden), tokens):
            part = slice(start, start + tokens)
            lost, gradient = _tokens(hidden[part], weight, mine[part], counted[part], group, wanted)
            loss += lost
            if gradient is not None and to_hidden is not None:
                gradient = (gradient * scale).to(hidden.dtype)
                to_hidden[part] = gradient @ weight
                to_weight += gradient.T @ hidden[part]
        ctx.group, ctx.dtype = group, weight.dtype
        ctx.save_for_backward(to_hidden, to_weight)
        return loss * scale

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph("vocabulary_parallel_linear_cross_entropy")
        to_hidden, to_weight = (each * incoming for each in ctx.saved_tensors)
        dist.all_reduce(to_hidden, group=ctx.group)
        return to_hidden, to_weight.to(ctx.dtype), None, None, None, None, None


def _tokens(
    hidden: Tensor, weight: Tensor, mine: Tensor, counted: Tensor, group: Any, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """The sum of the losses of some tokens, and the gradient of this rank's logits `(T, rows)` if it is wanted."""
    logits = F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))
    rows = weight.shape[0]
    largest = logits.amax(-1) if rows else logits.new_full((len(hidden),), float("-inf"))
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    is_mine = (mine >= 0) & (mine < rows)
    places = mine.clamp(0, max(rows - 1, 0)).unsqueeze(-1).long()
    hit = logits.gather(-1, places).squeeze(-1) if rows else torch.zeros_like(largest)
    sums = torch.stack(((logits - largest.unsqueeze(-1)).exp().sum(-1), hit.masked_fill(~is_mine, 0.0)))
    dist.all_reduce(sums, group=group)
    lse = sums[0].log() + largest
    loss = (lse - sums[1]).masked_fill(~counted, 0.0).sum()
    if not wanted:
        return loss, None
    gradient = (logits - lse.unsqueeze(-1)).exp()
    if rows:
        gradient.scatter_add_(-1, places, -is_mine.to(gradient.dtype).unsqueeze(-1))
    return loss, gradient.masked_fill_(~counted.unsqueeze(-1), 0.0)
