"""Bias and activation, and bias, dropout and residual add: results, gradients, masks, kernels and operators."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.fused_ln_act import bias_act, bias_dropout_add
from kernel_pytorch.fused_ln_act._core import philox
from kernel_pytorch.fused_ln_act.rules.activations import ACTIVATIONS
from kernel_pytorch.harness.checks import (
    check_compiled_equals_eager,
    check_deterministic,
    check_export,
    check_gradient_combinations,
    check_rows_independent,
    check_second_derivatives,
)
from kernel_pytorch.harness.launches import count_launches

LEVELS = ["reference", "native", "torchscript", "triton"]  # "compile" is held by the declaration's tests
operators = torch.ops.kernel_pytorch
pytestmark = [pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated"), pytest.mark.slow]


def make(*shape, device, dtype=torch.float32):
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)


def arguments(device, *shape, dtype=torch.float32):
    """x, bias and residual."""
    torch.manual_seed(0)
    return [make(*s, device=device, dtype=dtype) for s in (shape, shape[-1:], shape)]


def seed_on(device, number=2024):
    return torch.tensor(number, device=device)


# What they compute.


def test_a_long_sum_in_float32_loses_nothing(device):
    """One large gradient, then thousands too small to change it one by one; eager sums in a tree."""
    x, bias = torch.zeros(20000, 16, device=device), torch.zeros(16, device=device, requires_grad=True)
    dy = torch.full((20000, 16), 1e-4, device=device)
    dy[::5000] = 4096.0  # half of a unit in its last place is 1.2e-4 and more
    (dbias,) = torch.autograd.grad(bias_act(x, bias, "relu_squared", level="triton"), bias, torch.zeros_like(dy))
    assert dbias.eq(0).all()
    (dbias,) = torch.autograd.grad(bias_act(x + 0.5, bias, "relu_squared", level="triton"), bias, dy)
    exact = dy.double().sum(0)
    assert ((dbias.double() - exact).abs() <= exact * 2**-23).all()


@pytest.mark.parametrize("level", LEVELS)
def test_they_are_what_pytorch_computes_step_by_step(level, device):
    x, bias, residual = arguments(device, 5, 33)
    ours = bias_act(x, bias, "gelu", level=level)
    torch.testing.assert_close(ours, torch.nn.functional.gelu(x + bias))
    torch.testing.assert_close(bias_dropout_add(x, bias, residual, level=level), residual + (x + bias))
    torch.testing.assert_close(bias_act(x, None, "silu", level=level), torch.nn.functional.silu(x))


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_draws_the_mask_of_the_seed(level, device):
    x, bias, residual = arguments(device, 3, 7, 33)
    y = bias_dropout_add(x, bias, residual, 0.3, seed_on(device), level=level)
    kept = philox.keep(x, seed_on(device), 0.3)
    torch.testing.assert_close(y, residual + torch.where(kept, (x + bias) / 0.7, 0.0))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, torch.where(kept, 1 / 0.7, 0.0))


@pytest.mark.parametrize("level", LEVELS)
def test_without_a_seed_torch_draws_it(level, device):
    x, _, residual = arguments(device, 4, 64)
    torch.manual_seed(3)
    first, second = (bias_dropout_add(x, None, residual, 0.5, level=level) for _ in range(2))
    torch.manual_seed(3)
    again = bias_dropout_add(x, None, residual, 0.5, level=level)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("level", ["native", "triton"])
def test_checkpoint_draws_the_same_mask_again(level, device):
    x, bias, residual = arguments(device, 4, 64)

    def gradients(run):
        torch.manual_seed(3)
        return torch.autograd.grad(run(x, bias, residual).square().sum(), (x, bias, residual))

    def call(x, bias, residual):
        return bias_dropout_add(x, bias, residual, 0.5, level=level)

    plain = gradients(call)
    for ours, theirs in zip(gradients(lambda *t: checkpoint(call, *t, use_reentrant=False)), plain, strict=True):
        assert torch.equal(ours, theirs)


def test_dropout_keeps_mean_and_variance(device):
    """Of 2^16 ones with p 0.2: mean 1 and variance 0.25, each within five standard errors."""
    x = torch.ones(128, 512, device=device)
    y = bias_dropout_add(x, None, torch.zeros_like(x), 0.2, seed_on(device), level="triton")
    assert abs(y.mean().item() - 1.0) < 5 * (0.25 / 2**16) ** 0.5
    assert abs(y.var().item() - 0.25) < 5 * 0.75 * (0.25 / 2**16) ** 0.5


@pytest.mark.parametrize("level", LEVELS)
def test_dtypes(level, device):
    x, bias, residual = (t.detach() for t in arguments(device, 4, 8))
    assert bias_act(x.half(), bias, "gelu", level=level).dtype == torch.float16
    assert bias_dropout_add(x.half(), bias, residual, level=level).dtype == torch.float32
    assert bias_dropout_add(x.half(), bias.half(), residual.half(), level=level).dtype == torch.float16


BAD = {
    "no tensor": (lambda x, b: bias_act(None, b, "gelu"), TypeError, "x: given NoneType"),
    "integer x": (lambda x, b: bias_act(x.long(), b, "gelu"), TypeError, "x: dtype is torch.int64"),
    "bias shape": (lambda x, b: bias_act(x, b[:7], "gelu"), ValueError, r"bias: shape is \(7,\).* must be \(8,\)"),
    "bias device": (lambda x, b: bias_act(x, b.to("meta"), "gelu"), ValueError, "bias: device is meta"),
    "activation": (lambda x, b: bias_act(x, b, "swish"), ValueError, "activation: given 'swish'; allowed are 'gelu'"),
    "residual": (lambda x, b: bias_dropout_add(x, b, x[:2]), ValueError, r"residual: shape is \(2, 8\)"),
    "p": (lambda x, b: bias_dropout_add(x, b, x, 1.0), ValueError, "^p: given 1.0; it must be at least 0 and below 1"),
    "p text": (lambda x, b: bias_dropout_add(x, b, x, "0.1"), TypeError, "^p: given str"),
    "seed": (lambda x, b: bias_dropout_add(x, b, x, 0.1, 7), TypeError, "seed: given int"),
    "seed dtype": (lambda x, b: bias_dropout_add(x, b, x, 0.1, b[0]), TypeError, "seed: dtype is torch.float32"),
    "level": (lambda x, b: bias_act(x, b, "gelu", level="cutlass"), ValueError, "level: given 'cutlass'"),
    "operator, bias": (
        lambda x, b: operators.bias_act(x, b[:3], "gelu"), ValueError, r"bias: shape is \(3,\)"),
    "operator, seed": (
        lambda x, b: operators.bias_dropout_add(x, b, x, None, 0.5), ValueError, "seed: given None"),
    "operator, no x": (
        lambda x, b: operators.bias_act_backward(x, None, b, "gelu", True, True), ValueError, "given None"),
    "operator, dtype": (
        lambda x, b: operators.bias_dropout_add_backward(x, b, None, 0.0, "int8", True, True), ValueError,
        "x_dtype: given 'int8'; allowed are 'float16'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call(torch.ones(4, 8), torch.ones(8))


# Gradients.


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bias_act_twice(activation, level, device):
    x, bias, _ = arguments(device, 3, 4, dtype=torch.float64)
    check_second_derivatives(lambda *t: bias_act(*t, activation, level=level), [x, bias], fast=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_bias_dropout_add_twice(p, level, device):
    def function(*t):
        return bias_dropout_add(*t, p, seed_on(device), level=level)

    x, bias, residual = arguments(device, 3, 4, dtype=torch.float64)
    check_gradient_combinations(function, [x, bias, residual])
    check_second_derivatives(function, [x, bias, residual], fast=True)
    check_second_derivatives(lambda x, r: function(x, None, r), [x, residual], fast=True)


@pytest.mark.parametrize("level", LEVELS)
def test_every_combination_of_inputs(level, device):
    x, bias, _ = arguments(device, 3, 6)
    check_gradient_combinations(lambda *t: bias_act(*t, "gelu", level=level), [x, bias])


@pytest.mark.parametrize("activation", ["gelu", "identity", None])
def test_formula_equals_kernels(activation, device):
    x, bias, residual = arguments(device, 3, 6, dtype=torch.float64)
    if activation is None:
        y, inputs = operators.bias_dropout_add(x, bias, residual, seed_on(device), 0.4), (x, bias, residual)
    else:
        y, inputs = operators.bias_act(x, bias, activation), (x, bias)
    incoming = torch.randn_like(y)
    kernels = torch.autograd.grad(y, inputs, incoming, retain_graph=True)
    formula = torch.autograd.grad(y, inputs, incoming, create_graph=True)
    for ours, theirs in zip(kernels, formula, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_is_saved(device):
    """x only where it has an activation: never the sum, the activation or the mask."""
    x, bias, residual = arguments(device, 4, 8)

    def saved(call):
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.data_ptr()) or t, lambda t: t):
            call()
        return set(found)

    seed = seed_on(device)
    assert saved(lambda: bias_act(x, bias, "gelu", level="triton")) == {x.data_ptr(), bias.data_ptr()}
    dropped = saved(lambda: bias_dropout_add(x, bias, residual, 0.1, seed, level="triton"))
    assert dropped == {bias.data_ptr(), seed.data_ptr()}


# Kernels.


@pytest.mark.parametrize(
    ("name", "rows", "backward"),
    [
        ("bias_act", 600, ["_bias_backward_kernel", "_add_shares_kernel"]),
        ("bias_act", 100, ["_bias_backward_kernel"]),
        ("bias_dropout_add", 600, ["_bias_backward_kernel", "_add_shares_kernel"]),
    ],
)
def test_launches(name, rows, backward, device):
    x, bias, residual = arguments(device, rows, 40)
    with count_launches() as forward:
        if name == "bias_act":
            y = bias_act(x, bias, "gelu", level="triton")
        else:
            y = bias_dropout_add(x, bias, residual, 0.1, seed_on(device), level="triton")
    with count_launches() as launched:
        y.backward(torch.ones_like(y))
    assert forward == ["_bias_forward_kernel"]
    assert launched == backward


def test_only_what_is_needed_is_launched(device):
    x, bias, residual = arguments(device, 100, 40)
    y = bias_dropout_add(x, bias.detach(), residual, level="triton")
    with count_launches() as launched:
        y.backward(torch.ones_like(y))
    assert launched == []
    y = bias_act(x, bias.detach(), "gelu", level="triton")
    with count_launches() as launched:
        y.backward(torch.ones_like(y))
    assert launched == ["_bias_backward_kernel"]


@pytest.mark.parametrize("columns", [1, 16, 300])
def test_reproducible_and_rows_independent(columns, device):
    x, bias, residual = arguments(device, 35, columns)

    def function(x, bias, residual):
        return bias_dropout_add(x, bias, residual, 0.1, seed_on(device), level="triton")

    check_deterministic(function, [x, bias, residual])
    check_rows_independent(function, [x, bias, residual])


# Operators.


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
def test_opcheck(device):
    x, bias, residual = arguments(device, 3, 4, 8)
    x = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    dy, seed = torch.randn_like(x), seed_on(device)
    cases = [
        (operators.bias_act, (x, bias, "gelu")),
        (operators.bias_act, (x.detach().half(), None, "silu")),
        (operators.bias_dropout_add, (x, bias, residual, seed, 0.4)),
        (operators.bias_dropout_add, (x.detach().half(), None, residual, None, 0.0)),
        (operators.bias_act_backward, (dy.requires_grad_(), x, bias, "gelu", True, True)),
        (operators.bias_act_backward, (dy.detach(), None, bias.detach(), "identity", False, True)),
        (operators.bias_act_backward, (dy.detach(), x.detach(), None, "relu", True, True)),
        (operators.bias_dropout_add_backward, (dy, bias, seed, 0.4, "float16", True, True)),
        (operators.bias_dropout_add_backward, (dy.detach(), None, None, 0.0, "float32", False, False)),
    ]
    for operator, given in cases:
        torch.library.opcheck(operator.default, given)


@pytest.mark.parametrize("name", ["bias_act", "bias_dropout_add"])
def test_compiled_is_bitwise_eager(name, device):
    def function(x, bias, residual):
        if name == "bias_act":
            return bias_act(x, bias, "gelu", level="triton") + 0 * residual
        return bias_dropout_add(x, bias, residual, 0.3, seed_on(device), level="triton")

    check_compiled_equals_eager(function, arguments(device, 6, 40), dynamic=True)


def test_export(device):
    x, bias, _ = (t.detach() for t in arguments(device, 6, 40))
    program = check_export(lambda *t: bias_act(*t, "gelu", level="triton"), [x, bias])
    assert sum("kernel_pytorch" in str(node.target) for node in program.graph.nodes) == 1


def test_flop_counter_sees_the_operators(device):
    x, bias, residual = arguments(device, 4, 8)
    with FlopCounterMode(display=False) as counter:
        bias_dropout_add(x, bias, residual, 0.1, seed_on(device), level="triton").sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[operators.bias_dropout_add] == 3 * 32
    assert counts[operators.bias_dropout_add_backward] == 2 * 32
