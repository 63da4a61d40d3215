"""Attention of a sequence that is divided among ranks: keys and values go round in a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernel_pytorch.flash_attn_triton import flash_attention_with_lse


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup | None = None, causal: bool = True,
    scale: float | None = None, level: str | None = None,
) -> Tensor:  # fmt: skip
    """Compute `flash_attention` of a sequence of which each rank has an equal part, in the order of the ranks.

    Each of n steps attends to the keys of one rank while those of the next are under way; lse weighs the results. The
    split is plain: with causal, rank r has r + 1 parts to compute, so the last rank decides the time. The backward
    sends keys, values and their gradients round and computes each part's forward again. No second derivatives.

    Args:
        q: `(B, H, S / n, D)`, the queries of this rank; dtypes as in `flash_attention`.
        k, v: `(B, K, S / n, D)`, its keys and values; K divides H.
        group: the ranks, of which each calls this with the same shapes; None for all.
        causal, scale, level: as in `flash_attention_with_lse`, of the whole sequence.

    Returns:
        This rank's part of the output, as q.

    Raises:
        TypeError, ValueError, RuntimeError: k or v is not as long as q; as `flash_attention_with_lse`.

    Source: Liu et al., "Ring Attention", 2023, https://arxiv.org/abs/2310.01889.
    """
    if not q.shape[2] == k.shape[2] == v.shape[2]:
        lengths = f"{q.shape[2]}, {k.shape[2]} and {v.shape[2]}"
        raise ValueError(f"q, k, v: they have {lengths} tokens; all must have the same number, on each rank")
    return _Ring.apply(q, k, v, group, causal, scale, level)  # type: ignore[no-any-return]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
        group, causal, scale, level = ctx.given = given
        pair, ranks = torch.stack((k, v)), dist.get_world_size(group)
        output = lse = None
        for step in range(ranks):
            arrived = _pass_on(pair, group) if step + 1 < ranks else None
            if _sees(step, group, causal):
                part = flash_attention_with_lse(q, *pair, causal=causal and step == 0, scale=scale, level=level)
                output, lse = part if output is None else combine(output, lse, *part)
            pair = pair if arrived is None else arrived()
        assert output is not None
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, lse)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, lse = ctx.saved_tensors
        group, causal, scale, level = ctx.given
        wide, ranks = lse.dtype, dist.get_world_size(group)
        pair, q, incoming = torch.stack((k, v)), q.detach().requires_grad_(), incoming.to(wide)
        common = (incoming * output).sum(-1)
        to_q, to_pair = torch.zeros_like(q, dtype=wide), torch.zeros_like(pair, dtype=wide)
        for step in range(ranks):
            arrived = _pass_on(pair, group) if step + 1 < ranks else None
            if _sees(step, group, causal):
                inputs = q, *(each.detach().requires_grad_() for each in pair)
                with torch.enable_grad():
                    part = flash_attention_with_lse(*inputs, causal=causal and step == 0, scale=scale, level=level)
                # The output is the sum of parts, weighted by these, which depend on lse alone.
                weight = (part[1] - lse).exp()
                to_lse = weight * ((incoming * part[0]).sum(-1) - common)
                to_output = (weight.unsqueeze(-1) * incoming).to(q.dtype)
                found = torch.autograd.grad(part, inputs, (to_output, to_lse))
                to_q += found[0]
                to_pair += torch.stack(found[1:])
            to_pair = _pass_on(to_pair, group)() if ranks > 1 else to_pair  # after n steps it is at home
            pair = pair if arrived is None else arrived()
        return to_q.to(q.dtype), *to_pair.to(k.dtype), None, None, None, None


def combine(output: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over the keys of two parts, in the dtype of lse, from the outputs and the lse of both."""
    both = torch.logaddexp(lse, more_lse)
    weights = ((each - both).exp().unsqueeze(-1) for each in (lse, more_lse))
    return output * next(weights) + more * next(weights), both


def _sees(step: int, group: Any, causal: bool) -> bool:
    """Whether the keys that are here after some steps are before the queries, or among them."""
    return not causal or step <= dist.get_rank(group)


def _pass_on(x: Tensor, group: Any) -> Callable[[], Tensor]:
    """Send x to the next rank; a call of the result waits for what comes from the one before."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    ring = dist.get_process_group_ranks(group or dist.group.WORLD)
    found, after, before = torch.empty_like(x), ring[(rank + 1) % ranks], ring[rank - 1]
    both = [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, found, before, group)]
    under_way = dist.batch_isend_irecv(both)

    def wait() -> Tensor:
        for each in under_way:
            each.wait()
        return found

    return wait
