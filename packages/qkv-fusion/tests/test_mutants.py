"""Planted faults: `kernel-pytorch verify` must turn red on each, naming level, case and quantity."""

import dataclasses

import pytest
import torch

from kernel_pytorch.harness.mutants import failures_of
from kernel_pytorch.qkv_fusion.norm_rope.levels import reference as norm_rope
from kernel_pytorch.qkv_fusion.projection.levels import reference as projection
from kernel_pytorch.qkv_fusion.rotary.levels import reference as rotary
from kernel_pytorch.qkv_fusion.technique import technique


def sign_of_the_sine(q, k, cos, sin, position_ids, interleaved, inverse):
    return rotary.rotary_embedding(q, k, cos, -sin, position_ids, interleaved, inverse)


def pairs_of_the_other_kind(q, k, cos, sin, position_ids, interleaved, inverse):
    return rotary.rotary_embedding(q, k, cos, sin, position_ids, not interleaved, inverse)


def keys_one_position_further(q, k, cos, sin, position_ids, interleaved, inverse):
    q_out, _ = rotary.rotary_embedding(q, k, cos, sin, position_ids, interleaved, inverse)
    cos, sin = cos.roll(1, -2), sin.roll(1, -2)
    return q_out, rotary.rotary_embedding(q, k, cos, sin, position_ids, interleaved, inverse)[1]


def one_table_for_all_sequences(q, k, cos, sin, position_ids, interleaved, inverse):
    if cos.dim() > 2:
        cos, sin = cos[:1].expand_as(cos), sin[:1].expand_as(sin)
    return rotary.rotary_embedding(q, k, cos, sin, position_ids, interleaved, inverse)


def positions_ignored(q, k, cos, sin, position_ids, interleaved, inverse):
    if position_ids is not None:
        position_ids = torch.arange(q.shape[-3], device=q.device) % cos.shape[0]
    return rotary.rotary_embedding(q, k, cos, sin, position_ids, interleaved, inverse)


def inverse_ignored(q, k, cos, sin, position_ids, interleaved, inverse):
    return rotary.rotary_embedding(q, k, cos, sin, position_ids, interleaved, False)


def rest_is_lost(q, k, cos, sin, *rest):
    outputs = rotary.rotary_embedding(q, k, cos, sin, *rest)
    turned = 2 * cos.shape[-1]
    return tuple(torch.cat((y[..., :turned], y[..., turned:] * 0), -1) for y in outputs)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, *rest):
        ctx.save_for_backward(cos, sin)
        ctx.rest = rest
        return rotary.rotary_embedding(q, k, cos, sin, *rest)

    @staticmethod
    def backward(ctx, *gradients):
        return *rotary.rotary_embedding(*gradients, *ctx.saved_tensors, *ctx.rest), None, None, None, None, None


def gradient_turned_the_other_way(q, k, cos, sin, *rest):
    return _Turn.apply(q, k, cos, sin, *rest)


ROTARY = {
    sign_of_the_sine: "output 0 is off by",
    pairs_of_the_other_kind: "output 0 is off by",
    keys_one_position_further: "output 1 is off by",
    one_table_for_all_sequences: "case batched tables",
    positions_ignored: "case positions",
    inverse_ignored: "case inverse",
    rest_is_lost: "case partial",
    gradient_turned_the_other_way: "gradient of q is off by",
}


def weights_exchanged(q, k, q_weight, k_weight, *rest):
    return norm_rope.qk_norm_rope(q, k, k_weight, q_weight, *rest)


def weight_gradient_dropped(q, k, q_weight, k_weight, *rest):
    return norm_rope.qk_norm_rope(q, k, q_weight, k_weight.detach(), *rest)


def rotated_before_the_norm(q, k, q_weight, k_weight, cos, sin, position_ids, eps, interleaved, offset):
    q, k = rotary.rotary_embedding(q, k, cos, sin, position_ids, interleaved, False)
    nothing = torch.ones_like(cos), torch.zeros_like(sin), position_ids
    return norm_rope.qk_norm_rope(q, k, q_weight, k_weight, *nothing, eps, interleaved, offset)


def offset_forgotten(*arguments):
    return norm_rope.qk_norm_rope(*arguments[:-1], 0.0)


def keys_not_rotated(q, k, q_weight, k_weight, cos, sin, *rest):
    q_out, _ = norm_rope.qk_norm_rope(q, k, q_weight, k_weight, cos, sin, *rest)
    _, k_out = norm_rope.qk_norm_rope(q, k, q_weight, k_weight, torch.ones_like(cos), torch.zeros_like(sin), *rest)
    return q_out, k_out


NORM_ROPE = {
    weights_exchanged: "is off by",
    weight_gradient_dropped: "gradient of k_weight is missing",
    rotated_before_the_norm: "is off by",
    offset_forgotten: "case Gemma",
    keys_not_rotated: "output 1 is off by",
}


def mean_not_subtracted(*arguments):
    return norm_rope.qk_norm_rope(*arguments)


def bias_dropped(x, weight, bias, *rest):
    return projection.qkv_projection(x, weight, None if bias is None else bias * 0, *rest)


def values_for_keys(*arguments):
    q, k, v = projection.qkv_projection(*arguments)
    return q, v, k


def heads_swapped_between_groups(x, weight, bias, num_heads, num_kv_heads, head_dim):
    q, k, v = projection.qkv_projection(x, weight, bias, num_heads, num_kv_heads, head_dim)
    return q.unflatten(-2, (num_kv_heads, -1)).transpose(-3, -2).flatten(-3, -2), k, v


def norm_of_values_too(x, weight, bias, q_weight, k_weight, *rest):
    q, k, v = projection.qkv_norm_rope(x, weight, bias, q_weight, k_weight, *rest)
    return q, k, v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)


PROJECTION = {
    bias_dropped: "case bias",
    values_for_keys: "output 1 is off by",
    heads_swapped_between_groups: "case typical",
}

FAULTS = {
    "rotary_embedding": ROTARY,
    "qk_norm_rope": NORM_ROPE,
    "qk_layer_norm_rope": {mean_not_subtracted: "is off by"},
    "qkv_projection": PROJECTION,
    "qkv_norm_rope": {norm_of_values_too: "output 2 is off by"},
}
MUTANTS = [(operation, mutant, sign) for operation, mutants in FAULTS.items() for mutant, sign in mutants.items()]
LARGE = ("many tokens", "long head")


def in_float32(point):
    """Each case once; what takes long shows no more."""
    return None if point.name in LARGE else dataclasses.replace(point, dtypes=(torch.float32,))


COPIES = {
    "rotary_embedding": rotary.rotary_embedding,
    "qk_norm_rope": norm_rope.qk_norm_rope,
    "qkv_norm_rope": projection.qkv_norm_rope,
}


@pytest.mark.parametrize("operation", COPIES)
def test_an_unchanged_copy_is_right(operation):
    assert failures_of(technique, operation, COPIES[operation], points=in_float32, adversarial=False) == []


@pytest.mark.parametrize(("operation", "mutant", "sign"), MUTANTS, ids=[mutant.__name__ for _, mutant, _ in MUTANTS])
def test_mutant_is_found(operation, mutant, sign):
    found = failures_of(technique, operation, mutant, points=in_float32, adversarial=False, budget_factor=4.0)
    assert any(f"{operation} level 'native', case " in line and sign in line for line in found), found[:5]
