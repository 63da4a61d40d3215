"""Planted faults: `kernel-pytorch verify` must turn red on each, naming level, case and quantity."""

import pytest
import torch

from kernel_pytorch.fused_ln_act._core.philox import keep
from kernel_pytorch.fused_ln_act.norm.levels import reference
from kernel_pytorch.fused_ln_act.technique import technique
from kernel_pytorch.harness.mutants import failures_of
from kernel_pytorch.harness.technique import Level

pytestmark = pytest.mark.slow


def wrong_variant(x, weight, bias, eps, activation, dropout_p, seed):
    activation = {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}.get(activation, activation)
    return reference.layer_norm_act(x, weight, bias, eps, activation, dropout_p, seed)


def bias_gradient_dropped(x, weight, bias, eps, activation, dropout_p, seed):
    bias = None if bias is None else bias.detach()
    return reference.layer_norm_act(x, weight, bias, eps, activation, dropout_p, seed)


class _OtherMaskBackward(torch.autograd.Function):
    """Dropout whose backward draws its mask by another seed than its forward."""

    @staticmethod
    def forward(ctx, y, seed, p):
        ctx.save_for_backward(seed)
        ctx.p = p
        return torch.where(keep(y, seed, p), y / (1 - p), 0.0)

    @staticmethod
    def backward(ctx, dy):
        (seed,) = ctx.saved_tensors
        return torch.where(keep(dy, seed + 1, ctx.p), dy / (1 - ctx.p), 0.0), None, None


def other_mask_backward(x, weight, bias, eps, activation, dropout_p, seed):
    y = reference.layer_norm_act(x, weight, bias, eps, activation, 0.0, None)
    return y if dropout_p == 0.0 else _OtherMaskBackward.apply(y.float(), seed, dropout_p).to(y.dtype)


def other_mask_forward(x, weight, bias, eps, activation, dropout_p, seed):
    seed = None if seed is None else seed + 1
    return reference.layer_norm_act(x, weight, bias, eps, activation, dropout_p, seed)


def difference_of_squares(x, weight, bias, eps, activation, dropout_p, seed):
    """The variance as E[x^2] - E[x]^2, which cancels."""
    h = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = h.mean(-1, keepdim=True)
    variance = (h.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0.0)
    z = (h - mean) * torch.rsqrt(variance + eps)
    z = z if weight is None else z * weight.to(z.dtype)
    z = z if bias is None else z + bias.to(z.dtype)
    return reference.drop(reference.activate(z, activation), seed, dropout_p).to(x.dtype)


def one_percent_too_large(x, weight, bias, eps, activation, dropout_p, seed):
    return reference.layer_norm_act(x, weight, bias, eps, activation, dropout_p, seed) * 1.01


def unbiased_variance(x, weight, bias, eps, activation, dropout_p, seed):
    """Divided by N - 1, as torch.var does."""
    columns = x.shape[-1]
    scale = ((columns - 1) / columns) ** 0.5
    weight = torch.full(x.shape[-1:], scale).to(x) if weight is None else weight * scale
    return reference.layer_norm_act(x, weight, bias, eps, activation, dropout_p, seed)


def dropped_elements_not_made_up_for(x, weight, bias, eps, activation, dropout_p, seed):
    return reference.layer_norm_act(x, weight, bias, eps, activation, dropout_p, seed) * (1.0 - dropout_p)


MUTANTS = {
    wrong_variant: ("output is off by", "gelu"),
    bias_gradient_dropped: ("gradient of bias is missing", ""),
    other_mask_backward: ("gradient of x is off by", "dropout_p"),
    other_mask_forward: ("output is off by", "dropout_p"),
    difference_of_squares: ("output is off by", "large mean"),
    one_percent_too_large: ("output is off by", ""),
    unbiased_variance: ("output is off by", ""),
    dropped_elements_not_made_up_for: ("output is off by", "dropout_p"),
}


def failures(function):
    """At the torchscript level; short rows alone: what is planted shows there."""

    def short(point):
        return point if point.sizes["shape"][-1] < 1000 else None

    return failures_of(technique, "layer_norm_act", function, level=Level.TORCHSCRIPT, points=short)


def test_an_unchanged_copy_is_right():
    assert failures(reference.layer_norm_act) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_found(mutant):
    quantity, case = MUTANTS[mutant]
    found = failures(mutant)
    named = [line for line in found if quantity in line and case in line]
    assert any("layer_norm_act level 'torchscript'" in line for line in named), found
