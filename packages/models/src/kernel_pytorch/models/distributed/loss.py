"""The loss of the next word where every rank has some rows of the head: `vocabulary_parallel_linear_cross_entropy`."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

LOGITS = 2**26
"""Bytes of logits that are in memory at a time, unless those of one token are more."""


def vocabulary_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Compute `linear_cross_entropy(hidden, head, target)` of a head whose rows lie on several ranks.

    The logits of a rank's own words are computed for some tokens at a time. Ranks exchange three numbers for each
    token: the largest logit, the sum of exponentials and the target's logit. Gradients are computed in the same pass,
    if they are wanted; the backward adds up that of hidden over the ranks. Second derivatives are refused.

    Args:
        hidden: `(..., H)`, floating point, the same on every rank.
        weight: the head `(V, H)` as a DTensor with `Shard(0)` on a mesh of one dimension; or a tensor `(V / n, H)`,
            the rows of this rank, as many on each of n ranks, in the order of the ranks. In the dtype of hidden.
        target: `(...)`, int64 or int32, the same on every rank: from 0 to V - 1, or ignore_index.
        group: the ranks that share the head; None for all ranks. Not allowed with a DTensor, which has its own.
        ignore_index: the target of tokens that have no loss and no gradient.
        softcap: bound of the logits, `softcap * tanh(logits / softcap)`; None for none.
        reduction: "mean" over the tokens that are not ignored, or "sum".

    Returns:
        `()`, the same on every rank, float32 (float64 of float64); zero if all tokens are ignored.

    Raises:
        ValueError: shapes, dtypes, placements, softcap or reduction do not fit; the message names the argument.
        IndexError: on a CPU, a target is neither a word nor ignore_index. Elsewhere such a token is
            ignored.

    Source: Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053, section 3.
    """
    local, group, first, words = _rows(weight, group)
    _check(hidden, local, target, softcap, reduction)
    flat = target.flatten()
    counted, is_word = flat != ignore_index, (flat >= 0) & (flat < words)
    if flat.is_cpu and bool((counted & ~is_word).any()):
        raise IndexError(f"target: it has a value outside of 0 to {words - 1} that is not ignore_index, {ignore_index}")
    counted = counted & is_word
    items = counted.sum().clamp(min=1) if reduction == "mean" else None
    mine = (flat - first).masked_fill(~counted, -1)
    most = -(-words // dist.get_world_size(group))  # the same on every rank, also where their rows are not as many
    tokens = max(1, LOGITS // (max(1, most) * torch.promote_types(hidden.dtype, torch.float32).itemsize))
    given = hidden.flatten(0, -2), local, mine, counted, items
    return _Loss.apply(*given, softcap, group, tokens)  # type: ignore[no-any-return]


def vocabulary_parallel_logits(hidden: Tensor, weight: DTensor) -> Tensor:
    """Compute `hidden @ weight.T`, gathered: `(..., V)` on every rank.

    Args:
        hidden: `(..., H)`, the same on every rank.
        weight: `(V, H)`, `Shard(0)` on a mesh of one dimension.
    """
    mesh = weight.device_mesh
    logits = F.linear(entering(hidden, mesh), weight.to_local())
    shape, stride = (*hidden.shape[:-1], weight.shape[0]), None
    if weight.shape[0] % mesh.size():  # parts of several sizes: DTensor has to be told the whole
        stride = torch.empty(shape, device="meta").stride()
    whole = None if stride is None else torch.Size(shape)
    found = DTensor.from_local(logits, mesh, [Shard(hidden.dim() - 1)], shape=whole, stride=stride)
    return found.redistribute(placements=[Replicate()]).to_local()


def entering(x: Tensor, mesh: Any) -> Tensor:
    """Return x, the same on every rank, where ranks begin to differ: the backward adds up their gradients."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def leaving(x: Tensor, mesh: Any) -> Tensor:
    """Add up the parts that ranks have of one tensor; the backward hands its gradient to each."""
    found = DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()])
    return found.to_local(grad_placements=[Replicate()])


def first_row(rows: int, mesh: Any) -> int:
    """Return where the rows of this rank begin in a tensor with `Shard(0)`, which `torch.chunk` divides."""
    return min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)


def _rows(weight: Tensor, group: Any) -> tuple[Tensor, Any, int, int]:
    """The rows of this rank, the ranks, the word of the first row, and the number of words."""
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        if group is not None:
            raise ValueError("group: given with a weight that is a DTensor, which has its own; it must be None")
        if mesh.ndim != 1 or weight.placements != (Shard(0),):
            placed = ", ".join(map(str, weight.placements))
            raise ValueError(f"weight: placed as {placed}; it must be Shard(0) on a mesh of one dimension")
        return weight.to_local(), mesh.get_group(), first_row(weight.shape[0], mesh), weight.shape[0]
    rows = weight.shape[0]
    return weight, group, dist.get_rank(group) * rows, dist.get_world_size(group) * rows


def _check(hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None, reduction: str) -> None:
    if weight.dim() != 2 or hidden.dim() < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"weight: shape is {tuple(weight.shape)} on this rank; it must be (words, {hidden.shape[-1]}), "
            f"and hidden (..., H) with at least two dimensions, given {tuple(hidden.shape)}"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"weight: dtype is {weight.dtype}; it must be that of hidden, {hidden.dtype}")
    if target.shape != hidden.shape[:-1] or target.dtype not in (torch.int64, torch.int32):
        wanted = f"int64 or int32 of shape {tuple(hidden.shape[:-1])}"
        raise ValueError(f"target: given {target.dtype} of shape {tuple(target.shape)}; it must be {wanted}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: given {softcap}; it must be above 0, or None")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: given {reduction!r}; allowed are 'mean', 'sum'")


class _Loss(torch.autograd.Function):
    """The loss of `(T, H)`, with the gradients in the same pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, mine: Tensor, counted: Tensor, items: Tensor | None,
        softcap: float | None, group: Any, tokens: int,
    ) -> Tensor:  # fmt: skip
        wide = torch.promote_types(hidden.dtype, torch.float32)
        wanted = ctx.needs_input_grad[:2]
        scale = torch.ones((), dtype=wide, device=hidden.device) if items is None else 1 / items.to(wide)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        to_hidden = torch.zeros_like(hidden) if wanted[0] else None
        to_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wanted[1] else None
        for start in range(0, len(hidden), tokens):
            part = slice(start, start + tokens)
            lost, gradient = _tokens(hidden[part], weight, mine[part], counted[part], softcap, group, any(wanted))
            loss += lost
            if gradient is not None:
                gradient = (gradient * scale).to(hidden.dtype)
                if to_hidden is not None:
                    to_hidden[part] = gradient @ weight
                if to_weight is not None:
                    to_weight += gradient.T @ hidden[part]
        ctx.group = group
        ctx.save_for_backward(to_hidden, None if to_weight is None else to_weight.to(weight.dtype))
        return loss * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight = ctx.saved_tensors
        if to_hidden is not None:
            to_hidden = to_hidden * incoming.to(to_hidden.dtype)
            dist.all_reduce(to_hidden, group=ctx.group)
        if to_weight is not None:
            to_weight = to_weight * incoming.to(to_weight.dtype)
        return to_hidden, to_weight, None, None, None, None, None, None


def _tokens(
    hidden: Tensor, weight: Tensor, mine: Tensor, counted: Tensor, softcap: float | None, group: Any, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """The sum of the losses of some tokens, and the gradient of this rank's logits `(T, rows)` if it is wanted."""
    logits = F.linear(hidden, weight).to(torch.promote_types(hidden.dtype, torch.float32))
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
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
    if softcap is not None:
        gradient *= 1 - (logits / softcap).square()
    return loss, gradient.masked_fill_(~counted.unsqueeze(-1), 0.0)
