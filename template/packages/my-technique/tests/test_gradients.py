"""Gradients: first and second derivatives at every level."""

import pytest
import torch

from kernel_pytorch.harness.checks import check_gradient_combinations, check_second_derivatives
from kernel_pytorch.my_technique import my_technique
from kernel_pytorch.my_technique.levels import LADDER

LEVELS = LADDER.levels("my_technique")


@pytest.mark.parametrize("level", LEVELS)
def test_gradient(level, device):
    torch.manual_seed(0)
    x = torch.randn(3, 6, device=device)
    check_gradient_combinations(lambda x: my_technique(x, beta=0.5, level=level), [x])


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "compile"])  # AOTAutograd refuses them
def test_second_derivatives(level, device):
    torch.manual_seed(0)
    x = torch.randn(3, 6, dtype=torch.float64, device=device)
    check_second_derivatives(lambda x: my_technique(x, beta=0.5, level=level), [x])


@pytest.mark.parametrize("level", LEVELS)
def test_gradient_far_out_is_a_number(level, device):
    x = torch.tensor([-1e4, 0.0, 1e4], device=device, requires_grad=True)
    my_technique(x, beta=0.5, level=level).sum().backward()
    expected = torch.autograd.grad(my_technique(x, beta=0.5, level="reference").sum(), x)
    assert x.grad.isfinite().all()
    torch.testing.assert_close((x.grad,), expected)
