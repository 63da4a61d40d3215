"""Planted faults in the gated, bias and softmax groups: `kernel-pytorch verify` must turn red on each."""

import dataclasses

import pytest
import torch

from kernel_pytorch.fused_ln_act import bias_dropout_add, levels
from kernel_pytorch.fused_ln_act._core import philox
from kernel_pytorch.fused_ln_act._core.plans import forget_plans
from kernel_pytorch.fused_ln_act.bias import operators as bias_operators
from kernel_pytorch.fused_ln_act.bias.levels import reference as bias
from kernel_pytorch.fused_ln_act.gated.levels import reference as gated
from kernel_pytorch.fused_ln_act.softmax.levels.reference import masked
from kernel_pytorch.fused_ln_act.softmax.levels.reference import softmax as reference_softmax
from kernel_pytorch.fused_ln_act.technique import technique
from kernel_pytorch.harness.mutants import failures_of
from kernel_pytorch.harness.technique import Level

pytestmark = pytest.mark.slow
TRITON = {name: levels.LADDER.function(name, "triton") for name in ("swiglu", "reglu", "bias_dropout_add")}

# Gated.


def gate_and_up_swapped(gate, up, alpha, limit, offset):
    gate, up = gated.halves(gate, up)
    return gated.swiglu(up, gate, alpha, limit, offset)


def limit_of_up_on_one_side(gate, up, alpha, limit, offset):
    gate, up = gated.halves(gate, up)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(max=limit)
    return gated.swiglu(gate, up, alpha, None, offset)


def clamped_gets_a_gradient(gate, up, alpha, limit, offset):
    gate, up = gated.halves(gate, up)
    if limit is not None:
        gate = gate + (gate.clamp(max=limit) - gate).detach()
    return gated.swiglu(gate, up.clamp(-limit, limit) if limit is not None else up, alpha, None, offset)


def offset_forgotten(gate, up, alpha, limit, offset):
    return gated.swiglu(gate, up, alpha, limit, 0.0)


def gradient_of_up_dropped(gate, up, alpha, limit, offset):
    gate, up = gated.halves(gate, up)
    return gated.swiglu(gate, up.detach(), alpha, limit, offset)


def two_launches(gate, up, alpha, limit, offset):
    return TRITON["swiglu"](gate, up, alpha, limit, offset) + 0 * TRITON["reglu"](gate, up, limit)


def the_other_gelu(gate, up, approximate, limit):
    return gated.geglu(gate, up, "tanh" if approximate == "none" else "none", limit)


def reglu_too_large(gate, up, limit):
    return gated.reglu(gate, up, limit) * 1.01


# Bias.


def the_other_activation(x, b, activation):
    return bias.bias_act(x, b, {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}.get(activation, activation))


def gradient_of_bias_dropped(x, b, activation):
    return bias.bias_act(x, None if b is None else b.detach(), activation)


def last_row_not_in_dbias(x, b, activation):
    if b is None or x.shape[0] < 2:
        return bias.bias_act(x, b, activation)
    return torch.cat([bias.bias_act(x[:-1], b, activation), bias.bias_act(x[-1:], b.detach(), activation)])


class _AnotherMaskInTheBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, seed, p):
        ctx.save_for_backward(seed)
        ctx.p = p
        return philox.dropout(z, seed, p)

    @staticmethod
    def backward(ctx, dz):
        return philox.dropout(dz, ctx.saved_tensors[0] + 1, ctx.p), None, None


def mask_of_the_backward_differs(x, b, residual, p, seed):
    if p == 0.0 or x.dtype.itemsize < 4:
        return bias.bias_dropout_add(x, b, residual, p, seed)
    return residual + _AnotherMaskInTheBackward.apply(x if b is None else x + b, seed, p)


def kept_are_not_scaled(x, b, residual, p, seed):
    return bias.bias_dropout_add(x * (1 - p), None if b is None else b * (1 - p), residual, p, seed)


def residual_is_dropped_too(x, b, residual, p, seed):
    return bias.bias_dropout_add(x + residual, b, torch.zeros_like(residual), p, seed)


def another_launch(x, b, residual, p, seed):
    y = TRITON["bias_dropout_add"](x, b, residual, p, seed)
    return bias_operators.bias_act(y, None, "identity")


# Softmax.


def masked_out_rows_are_nan(x, scale, mask):
    if mask is None:
        return reference_softmax(x, scale, mask)
    return torch.softmax(masked(x.float() * scale, mask), -1).to(reference_softmax(x, scale, mask).dtype)


def scale_after_the_mask(x, scale, mask):
    if mask is None or mask.dtype == torch.bool:
        return reference_softmax(x, scale, mask)
    return reference_softmax(x, scale, mask * scale)


def gradient_of_the_mask_dropped(x, scale, mask):
    return reference_softmax(x, scale, None if mask is None else mask.detach())


def last_column_not_in_the_sum(x, scale, mask):
    y = reference_softmax(x, scale, mask)
    return y / (1.0 - y[..., -1:]).clamp_min(0.5) if x.shape[-1] > 1 else y


class _ForgetfulBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy - 0.01 * dy.sum(-1, keepdim=True).abs() * torch.linspace(0, 1, dy.shape[-1], dtype=dy.dtype)


def gradients_astray(x, scale, mask):
    return _ForgetfulBackward.apply(reference_softmax(x, scale, mask))


def softmax_too_large(x, scale, mask):
    return reference_softmax(x, scale, mask) * 1.01


MUTANTS = [
    (gate_and_up_swapped, "swiglu", "output is off by"),
    (limit_of_up_on_one_side, "swiglu", "output is off by"),
    (clamped_gets_a_gradient, "swiglu", "gradient of gate is off by"),
    (offset_forgotten, "swiglu", "output is off by"),
    (gradient_of_up_dropped, "swiglu", "gradient of up is missing"),
    (two_launches, "swiglu", "launches 2 kernels"),
    (the_other_gelu, "geglu", "output is off by"),
    (reglu_too_large, "reglu", "output is off by"),
    (the_other_activation, "bias_act", "output is off by"),
    (gradient_of_bias_dropped, "bias_act", "gradient of bias is missing"),
    (last_row_not_in_dbias, "bias_act", "gradient of bias is off by"),
    (mask_of_the_backward_differs, "bias_dropout_add", "gradient of x is off by"),
    (kept_are_not_scaled, "bias_dropout_add", "output is off by"),
    (residual_is_dropped_too, "bias_dropout_add", "output is off by"),
    (another_launch, "bias_dropout_add", "launches 2 kernels"),
    (masked_out_rows_are_nan, "softmax", "NaN or infinite"),
    (scale_after_the_mask, "softmax", "output is off by"),
    (gradient_of_the_mask_dropped, "softmax", "gradient of mask is missing"),
    (last_column_not_in_the_sum, "softmax", "output is off by"),
    (gradients_astray, "softmax", "gradient of x is off by"),
    (softmax_too_large, "softmax", "output is off by"),
]
LAUNCHES = (two_launches, another_launch)


def failures(function, name):
    """Small, float32 and without adversaries: what is planted shows on ordinary shapes."""
    counted = function in LAUNCHES
    if counted and (reason := levels.LADDER.unavailable("triton", torch.device("cpu"), torch.float32)):
        pytest.skip(reason)

    def small(point):
        fits = torch.Size(point.sizes["shape"]).numel() < 10_000 and (point.core or not counted)
        return dataclasses.replace(point, dtypes=(torch.float32,)) if fits else None

    level = Level.TRITON if counted else Level.NATIVE
    return failures_of(technique, name, function, level=level, points=small, adversarial=False)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("swiglu", gated.swiglu),
        ("geglu", gated.geglu),
        ("reglu", gated.reglu),
        ("bias_act", bias.bias_act),
        ("bias_dropout_add", bias.bias_dropout_add),
        ("softmax", reference_softmax),
    ],
)
def test_an_unchanged_copy_is_right(name, function):
    assert failures(function, name) == []


@pytest.mark.parametrize(("mutant", "name", "message"), MUTANTS, ids=[mutant.__name__ for mutant, *_ in MUTANTS])
def test_mutant_is_found(mutant, name, message):
    found = failures(mutant, name)
    assert any(f"{name} level" in line and "case " in line and message in line for line in found), found


def test_a_kernel_that_draws_another_mask_is_found(monkeypatch, device):
    """The fault where it would be: the backward kernel is given another seed."""
    triton_backward = pytest.importorskip("kernel_pytorch.fused_ln_act.bias.kernels.backward")
    x = torch.randn(8, 40, device=device, requires_grad=True)
    bind = triton_backward.bind

    def gradient():
        y = bias_dropout_add(x, None, torch.zeros_like(x), 0.3, torch.tensor(5, device=device), level="triton")
        forget_plans()
        return torch.autograd.grad(y.sum(), x)[0]

    def astray(*arguments, **constants):
        launch = bind(*arguments, **constants)
        return lambda dy, x, b, seed, *rest: launch(dy, x, b, seed + 1, *rest)

    expected = gradient()
    assert torch.equal(gradient(), expected)
    monkeypatch.setattr(triton_backward, "bind", astray)
    assert not torch.equal(gradient(), expected)
    forget_plans()
