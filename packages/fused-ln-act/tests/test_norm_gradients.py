"""Gradients: every combination, twice differentiable, and equal to the formula that stands in for the kernels."""

import pytest
import torch

from kernel_pytorch import fused_ln_act
from kernel_pytorch.fused_ln_act import add_layer_norm, add_layer_norm_act, layer_norm_act, rms_norm_act
from kernel_pytorch.fused_ln_act.rules.activations import ACTIVATIONS
from kernel_pytorch.harness.checks import check_gradient_combinations, check_second_derivatives

LEVELS = ["reference", "native", "torchscript", "triton"]  # AOTAutograd, level "compile", refuses second derivatives
FUNCTIONS = {
    "layer_norm": {},
    "add_layer_norm": {"dropout_p": 0.4},
    "layer_norm_act": {"activation": "gelu", "dropout_p": 0.4},
    "add_layer_norm_act": {"activation": "silu", "dropout_p": 0.4},
    "rms_norm_act": {"activation": "gelu_tanh"},
    "add_rms_norm_act": {"activation": "quick_gelu"},
}
pytestmark = [pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated"), pytest.mark.slow]


def call(name, level, device, **changed):
    """The function of its tensors alone."""
    options = FUNCTIONS[name] | changed
    if options.get("dropout_p"):
        options = options | {"seed": torch.tensor(5, device=device)}
    return lambda *tensors: getattr(fused_ln_act, name)(*tensors, **options, level=level)


def arguments(name, dtype, device, shape=(3, 6)):
    torch.manual_seed(0)
    shapes = [shape] * (2 if name.startswith("add_") else 1) + [shape[-1:]] * (1 if "rms" in name else 2)
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_combination_of_inputs(name, level, device):
    check_gradient_combinations(call(name, level, device), arguments(name, torch.float32, device))


def test_every_combination_of_inputs_compiled(device):
    torch._dynamo.reset()
    function = call("layer_norm_act", "compile", device, dropout_p=0.0)
    check_gradient_combinations(function, arguments("layer_norm_act", torch.float32, device))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_second_derivatives(name, level, device):
    check_second_derivatives(call(name, level, device), arguments(name, torch.float64, device, (2, 5)), fast=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivatives_of_every_activation(activation, device):
    name = "layer_norm_act"
    function = call(name, "triton", device, activation=activation, dropout_p=0.0)
    check_second_derivatives(function, arguments(name, torch.float64, device, (2, 5)), fast=True)


@pytest.mark.parametrize("level", LEVELS)
def test_without_parameters(level, device):
    x = torch.randn(3, 5, dtype=torch.float64, device=device)
    check_second_derivatives(lambda x: layer_norm_act(x, activation="gelu", level=level), [x], fast=True)
    check_second_derivatives(lambda x, r: add_layer_norm(x, r, level=level), [x, x.flip(0)], fast=True)
    check_second_derivatives(lambda x: rms_norm_act(x, activation="tanh", level=level), [x], fast=True)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("used", [0, 1])
def test_only_one_output_is_used(used, dropout_p, device):
    leaves = [t.requires_grad_() for t in arguments("add_layer_norm", torch.float64, device)]
    found, expected = (
        torch.autograd.grad(
            call("add_layer_norm", level, device, dropout_p=dropout_p)(*leaves)[used].sum(), leaves, allow_unused=True
        )
        for level in ("triton", "reference")
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("columns", [6, 8200])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_formula_equals_kernels(name, columns, device):
    leaves = [t.requires_grad_() for t in arguments(name, torch.float64, device, (3, columns))]
    outputs = call(name, "triton", device)(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    incoming = [torch.randn_like(o) for o in outputs]
    kernels = torch.autograd.grad(outputs, leaves, incoming, retain_graph=True)
    formula = torch.autograd.grad(outputs, leaves, incoming, create_graph=True)
    for ours, theirs in zip(kernels, formula, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_dtypes_of_gradients(device):
    """Each has the dtype of what it is the gradient of."""
    dtypes = (torch.float16, torch.float32, torch.float32, torch.float16)
    leaves = [
        t.to(d).requires_grad_()
        for t, d in zip(arguments("add_layer_norm", torch.float32, device), dtypes, strict=True)
    ]
    y, h = call("add_layer_norm", "triton", device)(*leaves)
    assert (y.dtype, h.dtype) == (torch.float32, torch.float32)
    found = torch.autograd.grad((y, h), leaves, (y, h))
    assert tuple(g.dtype for g in found) == dtypes


def test_incoming_gradients_that_are_views(device):
    """Expanded ones, as sum() makes, and transposed ones."""
    x = torch.randn(6, 4, 8, device=device, requires_grad=True)
    weight = torch.randn(8, device=device, requires_grad=True)
    found, expected = (
        torch.autograd.grad(
            (add_layer_norm_act(x.transpose(0, 1), x.transpose(0, 1).cos(), weight, activation="gelu", level=level)[0]
             .transpose(0, 1).sin() * 2).sum(), (x, weight))
        for level in ("triton", "reference")
    )  # fmt: skip
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
