"""Planted faults: `kernel-pytorch verify` must turn red on each, naming level, case and quantity."""

import pytest
import torch

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

PLANTS = [("rotary_embedding", plant, sign) for plant, sign in ROTARY.items()]
PLANTS += [("qk_norm_rope", plant, sign) for plant, sign in QK.items()]


@pytest.mark.parametrize(
    ("operation", "function"), [("rotary_embedding", rotary_embedding), ("qk_norm_rope", qk_norm_rope)]
)
def test_an_unchanged_copy_is_right(operation, function):
    assert failures_of(technique, operation, function) == []


@pytest.mark.parametrize(("operation", "plant", "sign"), PLANTS, ids=[plant.__name__ for _, plant, _ in PLANTS])
def test_plant_is_found(operation, plant, sign):
    found = failures_of(technique, operation, plant, adversarial=False)
    assert any(f"{operation} level 'native', case " in line and sign in line for line in found), found
