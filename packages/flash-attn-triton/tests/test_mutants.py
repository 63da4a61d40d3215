"""Planted faults: `kernel-pytorch verify` must turn red on each, naming level, case and quantity."""

import dataclasses

import pytest
import torch

from kernel_pytorch.flash_attn_triton.levels import reference
from kernel_pytorch.flash_attn_triton.technique import technique
from kernel_pytorch.harness.mutants import failures_of
from kernel_pytorch.harness.technique import Level

# Without real activations: 512 tokens take seconds each time.
QUICK = dataclasses.replace(
    technique, operations=[dataclasses.replace(o, real_input=None) for o in technique.operations]
)


def causal_off_by_one(q, k, v, causal, scale, window, *rest):
    return reference.flash_attention(q, k, v, False, scale, (-1, 1) if causal else None, *rest)


def causal_mask_dropped(q, k, v, causal, *rest):
    return reference.flash_attention(q, k, v, False, *rest)


def first_query_sees_the_first_key(q, k, v, causal, *rest):
    seen = min(q.shape[2], k.shape[2]) if causal else k.shape[2]
    return reference.flash_attention(q, k[:, :, :seen], v[:, :, :seen], causal, *rest)


def wrong_scale(q, k, v, causal, scale, *rest):
    return reference.flash_attention(q, k, v, causal, 1.01 * scale, *rest)


def one_tile_of_keys_skipped(q, k, v, causal, *rest):
    if not causal:
        k, v = (torch.cat((t[:, :, :64], t[:, :, 128:]), 2) for t in (k, v))
    return reference.flash_attention(q, k, v, causal, *rest)


def heads_of_a_group_by_modulo(q, k, v, *rest):
    groups = q.shape[1] // k.shape[1]
    return reference.flash_attention(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), *rest)


def one_percent_too_large(q, k, v, *rest):
    return reference.flash_attention(q, k, v, *rest) * 1.01


def gradient_of_queries_missing(q, k, v, *rest):
    return reference.flash_attention(q.detach(), k, v, *rest)


def sum_so_far_not_rescaled(q, k, v, causal, scale, *rest):
    """As if the maximum of the first tile of 64 keys were that of all."""
    if causal or k.shape[2] <= 64:
        return reference.flash_attention(q, k, v, causal, scale, *rest)
    s = reference.attention_scores(q, k, None, causal, scale, None, None, None)
    tiles = [(part - part.amax(-1, keepdim=True)).exp() for part in s.split(64, -1)]
    values = v.to(s.dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
    total = sum(p.sum(-1, keepdim=True) for p in tiles)
    return (torch.matmul(torch.cat(tiles, -1), values) / total).to(q.dtype)


PLAIN = {
    causal_off_by_one: "case causal",
    causal_mask_dropped: "case causal",
    first_query_sees_the_first_key: "case decoding",
    wrong_scale: "output is off by",
    one_tile_of_keys_skipped: "case whole tiles",
    heads_of_a_group_by_modulo: "case typical",
    one_percent_too_large: "output is off by",
    gradient_of_queries_missing: "gradient of q is missing",
    sum_so_far_not_rescaled: "case steep",
}


def window_off_by_one(q, k, v, causal, scale, window, *rest):
    window = None if window is None else (max(window[0] - 1, 0), window[1])
    return reference.flash_attention_with_lse(q, k, v, causal, scale, window, *rest)


def alibi_with_the_other_sign(q, k, v, causal, scale, window, softcap, alibi_slopes, *rest):
    slopes = None if alibi_slopes is None else -alibi_slopes
    return reference.flash_attention_with_lse(q, k, v, causal, scale, window, softcap, slopes, *rest)


def soft_cap_after_the_mask(q, k, v, causal, scale, window, softcap, alibi_slopes, sinks, dropout_p, seed, *_):
    s = reference.attention_scores(q, k, None, causal, scale, window, None, alibi_slopes)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    return reference.attend(s, v, sinks, dropout_p, seed)


def sink_dropped(q, k, v, causal, scale, window, softcap, alibi_slopes, sinks, *rest):
    o, lse = reference.flash_attention_with_lse(
        q, k, v, causal, scale, window, softcap, alibi_slopes, None, *rest
    )  # fmt: skip
    return o if sinks is None else o + 0 * sinks.sum(), lse


def lse_without_the_maximum(*arguments):
    o, lse = reference.flash_attention_with_lse(*arguments)
    s = reference.attention_scores(*arguments[:2], None, *arguments[3:8])
    return o, lse - s.detach().amax(-1)


def mask_of_another_seed(q, k, v, causal, scale, window, softcap, slopes, sinks, dropout_p, seed, *rest):
    seed = None if seed is None else seed + 1
    return reference.flash_attention_with_lse(
        q, k, v, causal, scale, window, softcap, slopes, sinks, dropout_p, seed, *rest
    )  # fmt: skip


FEATURES = {
    window_off_by_one: "case window",
    alibi_with_the_other_sign: "case ALiBi",
    soft_cap_after_the_mask: "case all of it",
    sink_dropped: "case sinks",
    lse_without_the_maximum: "output 1 is off by",
    mask_of_another_seed: "case dropout",
}


def bias_gradient_dropped(q, k, v, mask, *rest):
    return reference.flash_attention_masked(q, k, v, mask.detach(), *rest)


def bias_of_the_first_head_for_all(q, k, v, mask, *rest):
    return reference.flash_attention_masked(q, k, v, mask[:, :1], *rest)


MASKED = {bias_gradient_dropped: "gradient of mask is missing", bias_of_the_first_head_for_all: "case bias"}

MUTANTS = [
    *[("flash_attention", Level.NATIVE, mutant, sign) for mutant, sign in PLAIN.items()],
    *[("flash_attention_with_lse", Level.TORCHSCRIPT, mutant, sign) for mutant, sign in FEATURES.items()],
    *[("flash_attention_masked", Level.NATIVE, mutant, sign) for mutant, sign in MASKED.items()],
]


@pytest.mark.parametrize(
    ("operation", "level"),
    [("flash_attention", Level.NATIVE), ("flash_attention_with_lse", Level.TORCHSCRIPT)],
)
def test_an_unchanged_copy_is_right(operation, level):
    found = failures_of(QUICK, operation, getattr(reference, operation), level=level, adversarial=False)
    assert found == []


@pytest.mark.parametrize(
    ("operation", "level", "mutant", "sign"), MUTANTS, ids=[mutant.__name__ for _, _, mutant, _ in MUTANTS]
)
def test_mutant_is_found(operation, level, mutant, sign):
    case = sign.removeprefix("case ") if sign.startswith("case ") else None
    found = failures_of(
        QUICK, operation, mutant, level=level, adversarial=False, budget_factor=4.0,
        points=lambda point: point if point.core or point.name == case else None,
    )  # fmt: skip
    assert any(f"{operation} level {level.value!r}, case " in line and sign in line for line in found), found
