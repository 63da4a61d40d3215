"""Planted faults in decoding: `kernel-pytorch verify` must turn red on each, naming level, case and quantity."""

import pytest
import torch

from kernel_pytorch.flash_attn_triton.levels import reference
from kernel_pytorch.flash_attn_triton.masks import cached, gathered
from kernel_pytorch.flash_attn_triton.technique import technique
from kernel_pytorch.harness.mutants import failures_of
from kernel_pytorch.harness.technique import Level


def position_off_by_one(q, k, v, lengths, table, causal, scale, window, *rest):
    """As if the new token's key were not in the cache yet."""
    return reference.flash_decode(q, k, v, lengths, table, False, scale, (-1, -1) if not causal else (-1, 1), *rest)


def length_off_by_one(q, k, v, lengths, *rest):
    return reference.flash_decode(q, k, v, (lengths - 1).clamp(min=0), *rest)


def length_ignored(q, k, v, lengths, table, *rest):
    room = k.shape[2] * (1 if table is None else table.shape[1])
    return reference.flash_decode(q, k, v, torch.full_like(lengths, room), table, *rest)


def heads_by_modulo(q, k, v, *rest):
    group = q.shape[1] // k.shape[1]
    return reference.flash_decode(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), *rest)


def page_off_by_one(q, k, v, lengths, table, *rest):
    table = None if table is None else (table + 1) % k.shape[0]
    return reference.flash_decode(q, k, v, lengths, table, *rest)


def pages_in_their_order_in_memory(q, k, v, lengths, table, *rest):
    table = None if table is None else table.sort(-1).values
    return reference.flash_decode(q, k, v, lengths, table, *rest)


def window_off_by_one(q, k, v, lengths, table, causal, scale, window, *rest):
    window = None if window is None else (window[0] - 1, window[1])
    return reference.flash_decode(q, k, v, lengths, table, causal, scale, window, *rest)


def alibi_of_the_first_head_for_all(q, k, v, lengths, table, causal, scale, window, softcap, slopes, sinks):
    slopes = None if slopes is None else slopes[..., :1].expand(slopes.shape)
    return reference.flash_decode(q, k, v, lengths, table, causal, scale, window, softcap, slopes, sinks)


def in_splits(q, k, v, lengths, table, causal, scale, window, softcap, slopes, sinks, combine):
    """The formula over shares of 64 keys: `combine` gets outputs and lse of each, `(splits, B, H, Sq, ...)`."""
    k, v = (t if table is None else gathered(t, table) for t in (k, v))
    behind, sees, valid = cached(lengths, q.shape[2], k.shape[2], causal, window)
    s = reference.attention_scores(q, k, None, False, scale, None, softcap, None)
    if slopes is not None:
        s = s - slopes.to(s.dtype)[..., None, None] * behind.abs()
    s, v = s.masked_fill(~sees, float("-inf")), v.masked_fill(~valid, 0.0).to(s.dtype)
    shares = [reference.attend(a, b, None, 0.0, None) for a, b in zip(s.split(64, -1), v.split(64, 2), strict=True)]
    outputs, lse = (torch.stack(parts) for parts in zip(*shares, strict=True))
    sink = None if sinks is None else sinks.to(s.dtype)[:, None]
    return combine(outputs, lse, sink).to(q.dtype)


def weighted(outputs, lse, sink, of_sink=1.0):
    top = lse.amax(0) if sink is None else torch.maximum(lse.amax(0), sink)
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = (lse - top).exp()
    total = weights.sum(0) + (0.0 if sink is None else of_sink * (sink - top).exp())
    return (weights[..., None] * outputs).sum(0) / total.masked_fill(total == 0.0, 1.0)[..., None]


def right_in_splits(*arguments):
    return in_splits(*arguments, weighted)


def splits_combined_without_the_maximum(*arguments):
    """As if every share had the maximum of the first: its weight is the sum of exponentials relative to its own."""

    def combine(outputs, lse, sink):
        return weighted(outputs, torch.where(lse > float("-inf"), lse - lse.clamp(min=-1e30), lse), sink)

    return in_splits(*arguments, combine)


def sink_in_every_split(*arguments):
    return in_splits(*arguments, lambda o, lse, sink: weighted(o, lse, sink, of_sink=len(lse)))


def last_split_dropped(*arguments):
    return in_splits(*arguments, lambda o, lse, sink: weighted(o[:-1], lse[:-1], sink))


MUTANTS = {
    position_off_by_one: "case verifying 4",
    length_off_by_one: "case typical",
    length_ignored: "case typical",
    heads_by_modulo: "case typical",
    page_off_by_one: "case pages",
    pages_in_their_order_in_memory: "case pages",
    window_off_by_one: "case window",
    alibi_of_the_first_head_for_all: "case ALiBi",
    splits_combined_without_the_maximum: "case typical",
    sink_in_every_split: "case sinks",
    last_split_dropped: "case typical",
}


def failures(mutant, case=None):
    return failures_of(
        technique, "flash_decode", mutant, level=Level.TORCHSCRIPT, adversarial=False, budget_factor=4.0,
        points=lambda point: point if case is None or point.core or point.name == case else None,
    )  # fmt: skip


@pytest.mark.parametrize("right", [reference.flash_decode, right_in_splits], ids=["a copy", "in splits"])
def test_what_is_right_stays_green(right):
    assert failures(right) == []


@pytest.mark.parametrize(("mutant", "sign"), MUTANTS.items(), ids=[mutant.__name__ for mutant in MUTANTS])
def test_mutant_is_found(mutant, sign):
    found = failures(mutant, sign.removeprefix("case "))
    assert any(f"flash_decode level 'torchscript', {sign} " in line and "output is off" in line for line in found), (
        found
    )
