"""The activations: PyTorch's where it has them, their derivatives, and Triton's twins of both."""

import pytest
import torch
from torch.nn import functional as F

from kernel_pytorch.fused_ln_act.activations import name_of
from kernel_pytorch.fused_ln_act.rules.activations import ACTIVATIONS, activate, derivative

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from kernel_pytorch.fused_ln_act.kernels import activations as triton_activations  # noqa: E402

STOCK = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": lambda x: x,
}


@triton.jit
def _kernel(x_ptr, y_ptr, dy_ptr, ACTIVATION: tl.constexpr, HALF: tl.constexpr, N: tl.constexpr):
    place = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + place)
    tl.store(y_ptr + place, triton_activations.activate(x, ACTIVATION, HALF))
    tl.store(dy_ptr + place, triton_activations.derivative(x, ACTIVATION, HALF))


def points(dtype, device="cpu"):
    """Both signs, from 1e-30 to 60, and zero."""
    magnitudes = torch.logspace(-30, 1.78, 255, dtype=torch.float64)
    return torch.cat([-magnitudes, torch.zeros(2), magnitudes]).to(dtype).to(device)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_definition_is_that_of_pytorch(name):
    x = points(torch.float64)
    torch.testing.assert_close(activate(x, name), STOCK[name](x), rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivative_is_that_of_autograd(name):
    x = points(torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad(activate(x, name).sum(), x)
    torch.testing.assert_close(derivative(x, name), expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_triton_computes_the_same(name, dtype, device):
    x = points(dtype, device)
    y, dy = torch.empty_like(x), torch.empty_like(x)
    _kernel[(1,)](x, y, dy, ACTIVATION=name, HALF=False, N=512)
    exact = x.double()
    eps = torch.finfo(dtype).eps
    # The definition in the dtype itself errs by a few units; the tails of gelu cancel there as here.
    torch.testing.assert_close(y.double(), activate(exact, name), rtol=8 * eps, atol=4 * eps)
    torch.testing.assert_close(dy.double(), derivative(exact, name), rtol=16 * eps, atol=8 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["tanh", "sigmoid", "silu"])
def test_small_results_keep_their_digits(name, dtype, device):
    """Relative to themselves: no cancellation around zero, none in the tails."""
    x = points(dtype, device)
    y, dy = torch.empty_like(x), torch.empty_like(x)
    _kernel[(1,)](x, y, dy, ACTIVATION=name, HALF=False, N=512)
    rtol = 8 * torch.finfo(dtype).eps * max(1.0, 60.0 if x.is_cuda else 1.0)  # ex2.approx errs with its argument
    torch.testing.assert_close(y.double(), STOCK[name](x.double()), rtol=rtol, atol=1e-37)


def everything(dtype, device):
    """All 65536 numbers of a 16-bit dtype, in float32; first those that are finite, and how many they are."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    finite = numbers.isfinite()
    return torch.cat([numbers[finite], numbers[~finite]]).to(device), int(finite.sum())


def units(exact, dtype):
    """The distance of neighbours in `dtype` around numbers, at least that of its subnormal ones; float64."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(exact)
    return torch.ldexp(torch.ones_like(exact), exponent - 1).clamp(min=info.tiny) * info.eps


# The interpreter's NumPy warns of squares that are infinite, and of what follows from infinity.
in_the_whole_range = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")


def half_results(name, dtype, device):
    """Value and derivative as kernels with 16-bit results compute them, at all numbers of that dtype, before rounding.

    They are followed by these numbers, all in float64, and the count of the finite ones.
    """
    x, count = everything(dtype, device)
    y, dy = torch.empty_like(x), torch.empty_like(x)
    _kernel[(8,)](x, y, dy, ACTIVATION=name, HALF=True, N=8192)
    return y.double(), dy.double(), x.double(), count


def truth(x, name):
    """Value and derivative, float64, where the definitions lose digits in their tails by forms that do not."""
    if name == "gelu":
        phi = 0.5 * torch.special.erfc(x * -0.7071067811865476)
        return x * phi, phi + x * torch.exp(-0.5 * x * x) * 0.3989422804014327
    if name in ("tanh", "sigmoid"):
        factor = 4.0 if name == "tanh" else 1.0
        u = factor**0.5 * x
        return activate(x, name), factor * torch.sigmoid(u) * torch.sigmoid(-u)
    if name in ("silu", "quick_gelu", "gelu_tanh"):  # x * sigmoid(u)
        u, slope = {"silu": (x, 1.0), "quick_gelu": (1.702 * x, 1.702)}.get(
            name, (1.5957691216057308 * (x + 0.044715 * x**3), 1.5957691216057308 * (1.0 + 0.134145 * x**2))
        )
        return x * torch.sigmoid(u), torch.sigmoid(u) + x * torch.sigmoid(u) * torch.sigmoid(-u) * slope
    return activate(x, name), derivative(x, name)


def check_half(found, exact, dtype, floor):
    """A sixteenth of a unit in the last place at most, or `floor`; what exceeds the dtype's range does so here too."""
    limit = torch.finfo(dtype).max
    excess = (found - exact).abs() - torch.maximum(units(exact, dtype) / 16, floor)
    assert excess[exact.abs() <= limit].max() <= 0
    assert (found.abs() >= limit)[exact.abs() > limit].all()


@in_the_whole_range
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_16_bit_forms_err_less_than_a_sixteenth_of_a_unit(name, dtype, device):
    y, dy, x, count = half_results(name, dtype, device)
    y, dy, x = y[:count], dy[:count], x[:count]
    # Exponentials stop at 2^-126, and what is multiplied by them is below 2^7 there: next to nothing in any dtype.
    nothing = torch.full_like(x, 2.0**-118)
    value, slope = truth(x, name)
    check_half(y, value, dtype, nothing)
    # Some derivatives are zero at a number around -1, where they are a difference of terms around one.
    floor = torch.where((x.abs() - 1.0).abs() < 0.6, 2.0**-19, nothing)
    check_half(dy, slope, dtype, floor)


@in_the_whole_range
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_16_bit_forms_pass_nan_on_and_keep_infinity(name, device):
    y, dy, x, count = half_results(name, torch.float16, device)
    y, dy, x = y[count:], dy[count:], x[count:]
    assert torch.equal(y[x > 0], activate(x[x > 0], name))
    assert y[x.isnan()].isnan().all()
    assert dy[x.isnan()].isnan().all() or name in ("relu", "identity")  # whose derivatives are chosen


@in_the_whole_range
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_and_infinity_are_those_of_the_definition(name, half, device):
    """The derivative is that which autograd has of PyTorch's operators: of relu at NaN it is one."""
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0] * 2, device=device)
    y, dy = torch.empty_like(x), torch.empty_like(x)
    _kernel[(1,)](x, y, dy, ACTIVATION=name, HALF=half, N=8)
    wide = x.double().requires_grad_()
    value = activate(wide, name)
    (slope,) = torch.autograd.grad(value.sum(), wide)
    for found, expected in ((y, value), (dy, slope), (dy, derivative(wide, name))):
        torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_the_bound_of_16_bit_forms_sees_another_formula(device):
    """The other gelu, which float16 tells apart."""
    x, count = everything(torch.float16, device)
    x = x[:count].double()
    with pytest.raises(AssertionError):
        check_half(activate(x, "gelu_tanh"), activate(x, "gelu"), torch.float16, torch.zeros_like(x))


def test_names_of_stock_modules():
    named = {name_of(module) for module in (
        torch.nn.GELU(), torch.nn.GELU("tanh"), torch.nn.SiLU(), torch.nn.ReLU(), torch.nn.Tanh(), torch.nn.Sigmoid(),
        torch.nn.Identity(),
    )}  # fmt: skip
    assert named == set(ACTIVATIONS) - {"relu_squared", "quick_gelu"}
    assert name_of(torch.nn.ELU()) is None
