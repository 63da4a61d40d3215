"""The activations: PyTorch's where it has them, their derivatives, and Triton's twins of both."""

import pytest
import torch
from torch.nn import functional as F

from kernel_pytorch.fused_ln_act.activations import ACTIVATIONS, activate, derivative, name_of

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from kernel_pytorch.fused_ln_act import triton_activations  # noqa: E402

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
def _kernel(x_ptr, y_ptr, dy_ptr, ACTIVATION: tl.constexpr, N: tl.constexpr):
    place = tl.arange(0, N)
    x = tl.load(x_ptr + place)
    tl.store(y_ptr + place, triton_activations.activate(x, ACTIVATION))
    tl.store(dy_ptr + place, triton_activations.derivative(x, ACTIVATION))


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
    _kernel[(1,)](x, y, dy, ACTIVATION=name, N=512)
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
    _kernel[(1,)](x, y, dy, ACTIVATION=name, N=512)
    rtol = 8 * torch.finfo(dtype).eps * max(1.0, 60.0 if x.is_cuda else 1.0)  # ex2.approx errs with its argument
    torch.testing.assert_close(y.double(), STOCK[name](x.double()), rtol=rtol, atol=1e-37)


def test_names_of_stock_modules():
    named = {name_of(module) for module in (
        torch.nn.GELU(), torch.nn.GELU("tanh"), torch.nn.SiLU(), torch.nn.ReLU(), torch.nn.Tanh(), torch.nn.Sigmoid(),
        torch.nn.Identity(),
    )}  # fmt: skip
    assert named == set(ACTIVATIONS) - {"relu_squared", "quick_gelu"}
    assert name_of(torch.nn.ELU()) is None
