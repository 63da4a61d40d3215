"""Gradients: every combination, twice differentiable, and equal to the formula that stands in for the kernels."""

import pytest
import torch

from kernel_pytorch.harness.checks import check_gradient_combinations, check_second_derivatives
from kernel_pytorch.rmsnorm import add_rms_norm, head_rms_norm, rms_norm
from kernel_pytorch.rmsnorm._core import cuda_level

LEVELS = ["reference", "native", "torchscript", "triton"]  # AOTAutograd, level "compile", refuses second derivatives
LEVELS += ["cuda"] if cuda_level.cuda_ops is not None else []

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


def arguments(name, dtype, device, rows=3, columns=6):
    torch.manual_seed(0)
    shapes = {
        "rms_norm": [(rows, columns), (columns,)],
        "add_rms_norm": [(rows, columns), (rows, columns), (columns,)],
        "head_rms_norm": [(rows, 2, columns), (2, columns)],
    }
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes[name]]


FUNCTIONS = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "head_rms_norm": head_rms_norm}


@pytest.mark.parametrize("level", [*LEVELS, pytest.param("compile", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_combination_of_inputs(name, level, device):
    def function(*tensors):
        return FUNCTIONS[name](*tensors, level=level)

    check_gradient_combinations(function, arguments(name, torch.float32, device))


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives(name, level, casting, device):
    def function(*tensors):
        return FUNCTIONS[name](*tensors, offset=0.5, casting=casting, level=level)

    # A call or two for each element.
    check_second_derivatives(function, arguments(name, torch.float64, device, rows=2, columns=3))


@pytest.mark.parametrize("level", LEVELS)
def test_without_weight(level, device):
    x = torch.randn(3, 5, dtype=torch.float64, device=device)
    check_second_derivatives(lambda x: rms_norm(x, level=level), [x])
    check_second_derivatives(lambda x, r: add_rms_norm(x, r, level=level), [x, x.flip(0)])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("used", [0, 1])
def test_only_one_output_is_used(level, used, device):
    x, residual, weight = (t.requires_grad_() for t in arguments("add_rms_norm", torch.float64, device))
    expected = torch.autograd.grad(
        add_rms_norm(x, residual, weight, level="reference")[used].sum(), (x, residual, weight), allow_unused=True
    )
    found = torch.autograd.grad(
        add_rms_norm(x, residual, weight, level=level)[used].sum(), (x, residual, weight), allow_unused=True
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs)


def test_formula_equals_kernels(device):
    x, residual, weight = (t.requires_grad_() for t in arguments("add_rms_norm", torch.float64, device))
    outputs = add_rms_norm(x, residual, weight, level="triton")
    incoming = [torch.randn_like(o) for o in outputs]
    kernels = torch.autograd.grad(outputs, (x, residual, weight), incoming, retain_graph=True)
    formula = torch.autograd.grad(outputs, (x, residual, weight), incoming, create_graph=True)
    for ours, theirs in zip(kernels, formula, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_compile_refuses_second_derivatives_clearly(device):
    x = torch.randn(3, 5, device=device, requires_grad=True)
    (dx,) = torch.autograd.grad(rms_norm(x, level="compile").sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        dx.sum().backward()
