"""Attention of a sequence that is divided among ranks: keys and values go round in a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from kernel_pytorch.flash_attn_triton import flash_attention_with_lse

from .loss import refuse_graph


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup | None = None, causal: bool = True,
    scale: float | None = None, level: str | None = None, layout: Literal["contiguous", "zigzag"] = "contiguous",
) -> Tensor:  # fmt: skip
    """Compute `flash_attention` of a sequence of which each rank has an equal part.

    Each of n steps attends to the keys of one rank while those of the next are under way; lse weighs the results. The
    backward sends keys, values and their gradients round and computes each part's forward again. No second derivatives.

    Args:
        q: `(B, H, S / n, D)`, the queries of this rank; dtypes as in `flash_attention`.
        k, v: `(B, K, S / n, D)`, its keys and values; K divides H.
        group: the ranks, of which each calls this with the same shapes; None for all.
        causal, scale, level: as in `flash_attention_with_lse`, of the whole sequence.
        layout: "contiguous", rank r has the r-th of n parts: with causal it has r + 1 of them to compute, so the last
            rank decides the time. "zigzag", rank r has the tokens of `zigzag_positions`, the chunks r and 2n - 1 - r of
            2n: with causal all ranks have the same to compute.

    Returns:
        This rank's part of the output, as q.

    Raises:
        TypeError, ValueError, RuntimeError: k or v is not as long as q; the layout is unknown, or zigzag and S / n is
            odd; as `flash_attention_with_lse`.

    Source: Liu et al., "Ring Attention", 2023, https://arxiv.org/abs/2310.01889; zigzag: Grattafiori et al., "The Llama
    3 Herd of Models", 2024, https://arxiv.org/abs/2407.21783, section 3.3.2.
    """
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        shapes = ", ".join(str(tuple(each.shape)) for each in (q, k, v))
        raise ValueError(f"q, k, v: shapes are {shapes}; they must be (B, H, S / n, D) and twice (B, K, S / n, D)")
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f"layout: given {layout!r}; allowed are 'contiguous', 'zigzag'")
    if layout == "zigzag" and q.shape[2] % 2:
        raise ValueError(f"layout: given 'zigzag' for {q.shape[2]} tokens of a rank; their number must be even")
    chosen = _zigzag if layout == "zigzag" and causal else _contiguous
    return _Ring.apply(q, k, v, group, causal, scale, level, chosen)  # type: ignore[no-any-return]


def zigzag_positions(length: int, group: dist.ProcessGroup | None = None, device: Any = None) -> Tensor:
    """Return the positions of this rank's tokens under `layout="zigzag"`, chunks r and 2n - 1 - r of 2n.

    `tokens[:, positions]` is this rank's part of a sequence, and rotations are those of the same positions.

    Args:
        length: S, the tokens of the whole sequence, a multiple of 2n (else ValueError).
        group: the n ranks; None for all.
        device: of the result.

    Returns:
        `(S / n,)`, int64.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if length % (2 * ranks):
        raise ValueError(f"length: given {length}; it must be a multiple of {2 * ranks}, twice the ranks")
    chunks = torch.arange(length, device=device).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
        group, causal, scale, level, chosen = ctx.given = given
        pair, ranks = torch.stack((k, v)), dist.get_world_size(group)
        for step in range(ranks):
            arrived = _pass_on(pair, group) if step + 1 < ranks else None
            if step == 0:
                try:
                    output, lse = flash_attention_with_lse(q, *pair, causal=causal, scale=scale, level=level)
                except BaseException:
                    if arrived is not None:  # what is under way would be what the next call of a group gets
                        arrived()
                    raise
                output = output.to(lse.dtype)
            elif (both := chosen(step, group, causal, q.shape[2])) is not None:
                queries, keys = both
                part = flash_attention_with_lse(q[:, :, queries], *pair[:, :, :, keys], scale=scale, level=level)
                found = combine(output[:, :, queries], lse[:, :, queries], *part)
                output[:, :, queries], lse[:, :, queries] = found
            pair = pair if arrived is None else arrived()
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        refuse_graph("ring_attention")
        q, k, v, output, lse = ctx.saved_tensors
        group, causal, scale, level, chosen = ctx.given
        wide, ranks = lse.dtype, dist.get_world_size(group)
        pair, incoming = torch.stack((k, v)), incoming.to(wide)
        common = (incoming * output).sum(-1)
        to_q, to_pair = torch.zeros_like(q, dtype=wide), torch.zeros_like(pair, dtype=wide)
        for step in range(ranks):
            arrived = _pass_on(pair, group) if step + 1 < ranks else None
            both = (slice(None), slice(None)) if step == 0 else chosen(step, group, causal, q.shape[2])
            if both is not None:
                rows, keys = (slice(None), slice(None), both[0]), both[1]
                inputs = [each.detach().requires_grad_() for each in (q[rows], *pair[:, :, :, keys])]
                with torch.enable_grad():
                    part = flash_attention_with_lse(*inputs, causal=causal and step == 0, scale=scale, level=level)
                # The output is the sum of parts, weighted by these, which depend on lse alone.
                weight = (part[1] - lse[rows]).exp()
                to_lse = weight * ((incoming[rows] * part[0]).sum(-1) - common[rows])
                to_output = (weight.unsqueeze(-1) * incoming[rows]).to(q.dtype)
                found = torch.autograd.grad(part, inputs, (to_output, to_lse))
                to_q[rows] += found[0]
                to_pair[:, :, :, keys] += torch.stack(found[1:])
            to_pair = _pass_on(to_pair, group)() if ranks > 1 else to_pair  # after n steps it is at home
            pair = pair if arrived is None else arrived()
        return to_q.to(q.dtype), *to_pair.to(k.dtype), None, None, None, None, None


def combine(output: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention over the keys of two parts, in the dtype of lse, from the outputs and the lse of both."""
    both = torch.logaddexp(lse, more_lse)
    weights = ((each - both).exp().unsqueeze(-1) for each in (lse, more_lse))
    return output * next(weights) + more * next(weights), both


def _contiguous(step: int, group: Any, causal: bool, tokens: int) -> tuple[slice, slice] | None:
    """The queries that attend to what arrived in a step, not the first, and the keys that they see, without a mask."""
    return (slice(None), slice(None)) if not causal or step <= dist.get_rank(group) else None


def _zigzag(step: int, group: Any, causal: bool, tokens: int) -> tuple[slice, slice]:
    # All queries see the early chunk of a rank before this one; the late queries see both chunks of a rank behind it.
    early, late = slice(None, tokens // 2), slice(tokens // 2, None)
    return (slice(None), early) if step <= dist.get_rank(group) else (late, slice(None))


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
