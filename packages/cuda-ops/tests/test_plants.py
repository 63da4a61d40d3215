"""Planted faults: `kernel-pytorch verify` must turn red on each, naming level, case and quantity."""

import pytest
import torch

from kernel_pytorch.cuda_ops.flash_attention.reference import flash_attention
from kernel_pytorch.cuda_ops.technique import technique
from kernel_pytorch.harness.plants import failures_of


def wrong_scale(q, k, v, scale, causal):
    return flash_attention(q, k, v, 1.01 * scale, causal)


def causal_mask_dropped(q, k, v, scale, causal):
    return flash_attention(q, k, v, scale, False)


def first_query_sees_the_first_key(q, k, v, scale, causal):
    seen = min(q.shape[2], k.shape[2]) if causal else k.shape[2]
    return flash_attention(q, k[:, :, :seen], v[:, :, :seen], scale, causal)


def one_tile_of_keys_skipped(q, k, v, scale, causal):
    if not causal:
        k, v = (torch.cat((t[:, :, :64], t[:, :, 128:]), 2) for t in (k, v))
    return flash_attention(q, k, v, scale, causal)


def heads_of_a_group_apart(q, k, v, scale, causal):
    groups = q.shape[1] // k.shape[1]
    return flash_attention(q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), scale, causal)


def one_percent_too_large(q, k, v, scale, causal):
    return flash_attention(q, k, v, scale, causal) * 1.01


def gradient_of_queries_missing(q, k, v, scale, causal):
    return flash_attention(q.detach(), k, v, scale, causal)


def sum_so_far_not_rescaled(q, k, v, scale, causal):
    """As if the maximum of the first tile of 64 keys were that of all."""
    if causal or k.shape[2] <= 64:
        return flash_attention(q, k, v, scale, causal)
    groups = q.shape[1] // k.shape[1]
    keys, values = (t.to(torch.promote_types(t.dtype, torch.float32)).repeat_interleave(groups, 1) for t in (k, v))
    scores = torch.matmul(q.to(keys.dtype), keys.transpose(-1, -2)) * scale
    tiles = [(s - s.amax(-1, keepdim=True)).exp() for s in scores.split(64, -1)]
    total = sum(p.sum(-1, keepdim=True) for p in tiles)
    return (torch.matmul(torch.cat(tiles, -1), values) / total).to(q.dtype)


ATTENTION = {
    wrong_scale: "output is off by",
    causal_mask_dropped: "case causal",
    first_query_sees_the_first_key: "case decoding",
    one_tile_of_keys_skipped: "case whole tiles",
    heads_of_a_group_apart: "case typical",
    one_percent_too_large: "output is off by",
    gradient_of_queries_missing: "gradient of q is missing",
    sum_so_far_not_rescaled: "case steep",
}

PLANTS = [("flash_attention", plant, sign) for plant, sign in ATTENTION.items()]

COPIES = {"flash_attention": flash_attention}


@pytest.mark.parametrize(("operation", "function"), COPIES.items(), ids=list(COPIES))
def test_an_unchanged_copy_is_right(operation, function):
    assert failures_of(technique, operation, function) == []


@pytest.mark.parametrize(("operation", "plant", "sign"), PLANTS, ids=[plant.__name__ for _, plant, _ in PLANTS])
def test_plant_is_found(operation, plant, sign):
    budget = technique.operation(operation).implementation("cuda").budget_factor
    found = failures_of(technique, operation, plant, adversarial=False, budget_factor=budget)
    assert any(f"{operation} level 'native', case " in line and sign in line for line in found), found
