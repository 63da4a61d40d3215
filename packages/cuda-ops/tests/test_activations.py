"""The activations on vectors, through bias_act: against float64 over all of float32, on every instruction set."""

import json
import math

import pytest
import torch

from kernel_pytorch.cuda_ops import LIBRARY, bias_act
from kernel_pytorch.cuda_ops._fused_ln_act.activations import ACTIVATIONS, activate, derivative

# In units in the last place. Where an exponential's argument is rounded, the error grows with it.
ALLOWED = {
    "gelu": lambda z: 6.0 + 0.5 * z.abs(),
    "gelu_tanh": lambda z: 4.0 + 6.0 * (z.abs() + z.abs() ** 3 / 22),
    "silu": lambda z: 4.0 + 0.0 * z,
    "relu": lambda z: 0.0 * z,
    "relu_squared": lambda z: 0.51 + 0.0 * z,
    "quick_gelu": lambda z: 4.0 + 2.0 * z.abs(),
    "tanh": lambda z: 2.5 + 0.0 * z,
    "sigmoid": lambda z: 3.0 + 0.0 * z,
    "identity": lambda z: 0.0 * z,
}
PRODUCTS = ("gelu", "gelu_tanh", "silu", "quick_gelu")


def numbers():
    """All magnitudes of float32, and the range where activations bend, densely: `(N,)`."""
    bits = torch.arange(0, 0x7F800000, 100003, dtype=torch.int32).view(torch.float32)
    return torch.cat([bits, -bits, torch.linspace(-20.0, 20.0, 20001), torch.linspace(-110.0, 110.0, 10001)])


def exact(z, activation):
    """The activation and its derivative in float64, written so that nothing cancels."""
    if activation == "gelu":
        distribution = 0.5 * torch.special.erfc(-z * math.sqrt(0.5))
        return z * distribution, distribution + z * torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    if activation == "gelu_tanh":
        x = z.clamp(-64.0, 64.0)
        u = 2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
        s = torch.sigmoid(u)
        inner = 2.0 * math.sqrt(2.0 / math.pi) * (1.0 + 0.134145 * x * x)
        return z * s, s + x * s * torch.sigmoid(-u) * inner
    if activation == "tanh":
        return torch.tanh(z), 4.0 * torch.sigmoid(2.0 * z) * torch.sigmoid(-2.0 * z)
    if activation == "sigmoid":
        return torch.sigmoid(z), torch.sigmoid(z) * torch.sigmoid(-z)
    value, slope = activate(z, activation), derivative(z, activation)
    return value, slope


def ulps(got, want):
    """The error in units in the last place of float32; what float32 cannot hold has none."""
    unit = torch.exp2(torch.floor(torch.log2(want.abs().clamp(min=2.0**-126))) - 23)
    fits = torch.isfinite(want.float())
    return torch.where(fits, (got.double() - want).abs() / unit, 0.0)


def largest_errors(activation):
    """The largest error of the value beyond what is allowed, and of the slope relative to what it is made of."""
    x = numbers().requires_grad_()
    y = bias_act(x, None, activation)
    (slope,) = torch.autograd.grad(y.sum(), x)
    z = x.detach().double()
    want, want_slope = exact(z, activation)
    error = ulps(y.detach(), want)
    allowed = ALLOWED[activation](z)
    if activation in PRODUCTS:
        # A factor that is subnormal has lost digits, and z multiplies what is lost.
        allowed += torch.where(want.abs() < 2.0**-125 * (1.0 + z.abs()), 1.0 + z.abs(), 0.0)
    fits = torch.isfinite(want_slope.float())
    rest = (slope.double() - want_slope).abs() / want_slope.abs().clamp(min=1.0) * 2.0**24
    return (error - allowed).max().item(), rest[fits].max().item()


@pytest.mark.cpu_backend
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_accuracy(activation):
    value, slope = largest_errors(activation)
    assert value <= 0.0
    assert slope <= 6.0


@pytest.mark.cpu_backend
@pytest.mark.parametrize("isa", LIBRARY.instruction_sets[:-1])  # on the best run all the others
def test_accuracy_on_every_instruction_set(isa, run_on):
    program = "from test_activations import *\nprint(json.dumps([largest_errors(a) for a in ACTIVATIONS]))"
    for value, slope in json.loads(run_on(isa, program)):
        assert value <= 0.0
        assert slope <= 6.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_number_of_16_bits(activation, dtype, device):
    value, slope = largest_errors_of_16_bits(activation, dtype, device)
    assert value <= 0.53
    assert slope <= 0.53


def largest_errors_of_16_bits(activation, dtype, device):
    """The largest errors of the value and of its derivative in units in the last place: half of one is rounding."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = numbers[torch.isfinite(numbers)].to(device).requires_grad_()
    y = bias_act(x, None, activation)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y))
    z = x.detach().cpu().double()
    want, want_slope = exact(z, activation)
    # Where a derivative crosses zero, it is a difference of two numbers that are not small.
    terms = want_slope.abs().clamp(min=2.0**-5) if activation in PRODUCTS else want_slope
    # A factor below 2^-126 is zero, and up to three of z multiply it.
    lost = torch.full_like(z, 2.0**-14) if dtype == torch.float16 else 2.0**-124 * (1.0 + z.abs()) ** 3

    def error(got, truth, scale):
        unit = torch.exp2(torch.floor(torch.log2(torch.maximum(scale.abs(), lost)))) * torch.finfo(dtype).eps
        return torch.where(torch.isfinite(truth.to(dtype)), (got.cpu().double() - truth).abs() / unit, 0.0).max().item()

    return error(y.detach(), want, want), error(slope, want_slope, terms)


def test_an_inaccurate_activation_of_16_bits_is_found(monkeypatch, device):
    monkeypatch.setitem(largest_errors_of_16_bits.__globals__, "bias_act", lambda x, bias, name: torch.tanh(x) * 1.01)
    assert largest_errors_of_16_bits("tanh", torch.bfloat16, device)[0] > 1.0


def test_an_inaccurate_activation_is_found(monkeypatch):
    monkeypatch.setitem(largest_errors.__globals__, "bias_act", lambda x, bias, name: torch.tanh(x) * (1.0 + 2.0**-20))
    assert largest_errors("tanh")[0] > 0.0


@pytest.mark.cpu_backend
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_infinities_nan_and_zeros(activation, dtype):
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0] * 7, dtype=dtype)
    wide = x.double() if dtype == torch.float64 else x.float()
    torch.testing.assert_close(bias_act(x, None, activation), activate(wide, activation).to(dtype), equal_nan=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_infinity_are_those_of_the_definition_in_the_gradient_too(activation, dtype, device):
    """Where autograd of the definition has no number, neither has the kernel, and no other number changes."""
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0, -1.0] * 7, dtype=dtype, device=device).requires_grad_()
    y = bias_act(x, None, activation)
    (found,) = torch.autograd.grad(y, x, torch.ones_like(y))
    wide = x.detach().double().requires_grad_()
    want = activate(wide, activation)
    (expected,) = torch.autograd.grad(want, wide, torch.ones_like(want))
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps, "equal_nan": True}
    torch.testing.assert_close(y.double(), want, **tolerance)
    torch.testing.assert_close(found.double(), expected, **tolerance)


@pytest.mark.cpu_backend
@pytest.mark.parametrize("activation", ["tanh", "identity"])
def test_zero_keeps_its_sign(activation):
    y = bias_act(torch.tensor([0.0, -0.0] * 16), None, activation)
    assert torch.signbit(y).tolist() == [False, True] * 16


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float64(activation):
    x = torch.linspace(-30.0, 30.0, 1001, dtype=torch.float64, requires_grad=True)
    y = bias_act(x, None, activation)
    want, slope = exact(x.detach(), activation)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], slope, rtol=1e-12, atol=1e-15)
