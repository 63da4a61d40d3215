"""Planted faults: `kernel-pytorch verify` must turn red on each, naming level, case and quantity."""

import pytest
import torch

from kernel_pytorch.cuda_ops.flash_attention.reference import flash_attention
from kernel_pytorch.cuda_ops.qk_norm_rope.reference import qk_norm_rope
from kernel_pytorch.cuda_ops.rotary_embedding.reference import rotary_embedding
from kernel_pytorch.cuda_ops.technique import technique
from kernel_pytorch.harness.plants import failures_of


def turned_the_other_way(x, cos, sin, interleaved):
    return rotary_embedding(x, cos, -sin, interleaved)


def pairs_swapped(x, cos, sin, interleaved):
    return rotary_embedding(x, cos, sin, not interleaved)


def members_of_a_pair_exchanged(x, cos, sin, interleaved):
    return rotary_embedding(x, sin, cos, interleaved)


def position_off_by_one(x, cos, sin, interleaved):
    return rotary_embedding(x, cos.roll(1, -2), sin.roll(1, -2), interleaved)


def one_table_for_all_sequences(x, cos, sin, interleaved):
    if cos.dim() > 2:
        cos, sin = cos[:1].expand_as(cos), sin[:1].expand_as(sin)
    return rotary_embedding(x, cos, sin, interleaved)


def rest_is_lost(x, cos, sin, interleaved):
    y = rotary_embedding(x, cos, sin, interleaved)
    return torch.cat((y[..., : 2 * cos.shape[-1]], y[..., 2 * cos.shape[-1] :] * 0), -1)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return rotary_embedding(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, dy):
        return rotary_embedding(dy, *ctx.saved_tensors, ctx.interleaved), None, None, None


def gradient_turned_the_other_way(x, cos, sin, interleaved):
    return _Turn.apply(x, cos, sin, interleaved)


ROTARY = {
    turned_the_other_way: "output is off by",
    pairs_swapped: "output is off by",
    members_of_a_pair_exchanged: "output is off by",
    position_off_by_one: "output is off by",
    one_table_for_all_sequences: "case batched tables",
    rest_is_lost: "case partial",
    gradient_turned_the_other_way: "gradient of x is off by",
}


def weights_exchanged(q, k, q_weight, k_weight, *rest):
    return qk_norm_rope(q, k, k_weight, q_weight, *rest)


def weight_gradient_dropped(q, k, q_weight, k_weight, *rest):
    return qk_norm_rope(q, k, q_weight, k_weight.detach(), *rest)


def norm_over_all_heads(q, k, q_weight, k_weight, cos, sin, eps, interleaved, offset):
    def one(x, weight):
        h = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = h * torch.rsqrt(h.square().mean((-2, -1), keepdim=True) + eps) * (offset + weight)
        return rotary_embedding(normed, cos, sin, interleaved).to(x.dtype)

    return one(q, q_weight), one(k, k_weight)


def rotated_before_the_norm(q, k, q_weight, k_weight, cos, sin, eps, interleaved, offset):
    q, k = (rotary_embedding(x, cos, sin, interleaved) for x in (q, k))
    return qk_norm_rope(q, k, q_weight, k_weight, torch.ones_like(cos), torch.zeros_like(sin), eps, interleaved, offset)


def offset_forgotten(q, k, q_weight, k_weight, cos, sin, eps, interleaved, offset):
    return qk_norm_rope(q, k, q_weight, k_weight, cos, sin, eps, interleaved, 0.0)


def keys_not_rotated(q, k, q_weight, k_weight, cos, sin, *rest):
    q_out, _ = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, *rest)
    _, k_out = qk_norm_rope(q, k, q_weight, k_weight, torch.ones_like(cos), torch.zeros_like(sin), *rest)
    return q_out, k_out


QK = {
    weights_exchanged: "is off by",
    weight_gradient_dropped: "gradient of k_weight is missing",
    norm_over_all_heads: "is off by",
    rotated_before_the_norm: "is off by",
    offset_forgotten: "case Gemma",
    keys_not_rotated: "is off by",
}


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

PLANTS = [("rotary_embedding", plant, sign) for plant, sign in ROTARY.items()]
PLANTS += [("qk_norm_rope", plant, sign) for plant, sign in QK.items()]
PLANTS += [("flash_attention", plant, sign) for plant, sign in ATTENTION.items()]

COPIES = {"rotary_embedding": rotary_embedding, "qk_norm_rope": qk_norm_rope, "flash_attention": flash_attention}


@pytest.mark.parametrize(("operation", "function"), COPIES.items(), ids=list(COPIES))
def test_an_unchanged_copy_is_right(operation, function):
    assert failures_of(technique, operation, function) == []


@pytest.mark.parametrize(("operation", "plant", "sign"), PLANTS, ids=[plant.__name__ for _, plant, _ in PLANTS])
def test_plant_is_found(operation, plant, sign):
    budget = technique.operation(operation).implementation("cuda").budget_factor
    found = failures_of(technique, operation, plant, adversarial=False, budget_factor=budget)
    assert any(f"{operation} level 'native', case " in line and sign in line for line in found), found
