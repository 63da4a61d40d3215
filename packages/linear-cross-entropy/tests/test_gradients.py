"""Gradients: every combination, twice differentiable, and equal to the formula that stands in for the kernels."""

import pytest
import torch

from kernel_pytorch.harness.checks import check_gradient_combinations, check_second_derivatives
from kernel_pytorch.linear_cross_entropy import cross_entropy, linear_cross_entropy
from kernel_pytorch.linear_cross_entropy.operators import overlaps_itself

LEVELS = ["reference", "native", "torchscript", "triton"]  # AOTAutograd, level "compile", refuses second derivatives
OPTIONS = {
    "plain": {},
    "everything": {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 1.5},
    "of each token": {"reduction": "none", "chunk": 4},
}

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


def arguments(dtype, device, tokens=5, depth=4, words=9):
    torch.manual_seed(0)
    shapes = (tokens, depth), (words, depth), (words,)
    hidden, weight, bias = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    target = torch.randint(words, (tokens,), device=device)
    target[1] = -100
    return hidden, weight, target, bias


def loss_of(level, options):
    return lambda hidden, weight, target, bias: linear_cross_entropy(
        hidden, weight, target, bias=bias, level=level, **options
    )


@pytest.mark.parametrize("level", [*LEVELS, pytest.param("compile", marks=pytest.mark.slow)])
def test_every_combination_of_inputs(level, device):
    check_gradient_combinations(loss_of(level, OPTIONS["everything"]), arguments(torch.float32, device))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_second_derivatives(level, options, device):
    fast = level == "triton" or options != "plain"  # every number, or random directions
    check_second_derivatives(loss_of(level, OPTIONS[options]), arguments(torch.float64, device), fast=fast)


@pytest.mark.parametrize("level", LEVELS)
def test_second_derivatives_of_logits(level, device):
    logits, _, target, _ = arguments(torch.float64, device)

    def function(logits):
        return cross_entropy(logits, target % 4, **OPTIONS["everything"], level=level)

    check_second_derivatives(function, [logits], fast=level == "triton")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("level", ["native", "triton"])
def test_formula_equals_kernels(level, options, device):
    hidden, weight, target, bias = arguments(torch.float64, device)
    tensors = [t.requires_grad_() for t in (hidden, weight, bias)]
    loss = loss_of(level, OPTIONS[options])(hidden, weight, target, bias)
    incoming = torch.randn_like(loss)
    kernels = torch.autograd.grad(loss, tensors, incoming, retain_graph=True)
    formula = torch.autograd.grad(loss, tensors, incoming, create_graph=True)
    for ours, theirs in zip(kernels, formula, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_compile_refuses_second_derivatives_clearly(device):
    logits = torch.randn(3, 5, device=device, requires_grad=True)
    loss = cross_entropy(logits, torch.ones(3, dtype=torch.int64, device=device), level="compile")
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


@pytest.mark.parametrize("level", ["native", "triton"])
def test_gradients_in_float16_survive_a_mean_over_many_tokens(level, device):
    """Divided by 4096, most gradients of logits are below the smallest number of float16 unless they are scaled."""
    hidden, weight, target, _ = arguments(torch.float16, device, tokens=40, depth=16, words=300)
    tensors = hidden.requires_grad_(), weight.requires_grad_()
    factor = 1.0 / 4096.0

    def gradients(level, dtype):
        own = [t.detach().to(dtype).requires_grad_() for t in tensors]
        loss = linear_cross_entropy(*own, target, level=level) * factor
        return torch.autograd.grad(loss, own)

    for ours, exact in zip(gradients(level, torch.float16), gradients("reference", torch.float64), strict=True):
        # What is left is the last rounding, to multiples of 6e-8.
        assert (ours.double() - exact).abs().max() <= 2.0**-25 + 2.0**-10 * exact.abs().max()


# In place.


@pytest.mark.parametrize("level", ["native", "triton"])
def test_in_place_the_gradient_stands_where_the_logits_stood(level, device):
    hidden, weight, target, _ = arguments(torch.float32, device)
    hidden.requires_grad_()
    expected = torch.autograd.grad(cross_entropy(hidden @ weight.T, target, level="reference"), hidden)[0]
    logits = hidden @ weight.T
    before = logits.detach().clone()
    loss = cross_entropy(logits, target, inplace=True, level=level)
    assert torch.equal(logits, before)  # not before the backward
    at_logits, at_hidden = torch.autograd.grad(loss, (logits, hidden))
    assert at_logits.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(at_hidden, expected)


@pytest.mark.parametrize("level", ["native", "triton"])
def test_only_when_asked(level, device):
    logits, _, target, _ = arguments(torch.float32, device)
    logits.requires_grad_()
    before = logits.detach().clone()
    (gradient,) = torch.autograd.grad(cross_entropy(logits, target % 4, level=level), logits)
    assert torch.equal(logits, before)
    assert gradient.data_ptr() != logits.data_ptr()


@pytest.mark.parametrize("level", ["native", "triton"])
def test_in_place_nobody_reads_what_is_no_longer_there(level, device):
    hidden, weight, target, _ = arguments(torch.float32, device)
    hidden.requires_grad_()
    logits = hidden @ weight.T
    loss = cross_entropy(logits, target, inplace=True, level=level) + logits.square().mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward(retain_graph=True)
        loss.backward()


@pytest.mark.parametrize("level", ["native", "triton"])
def test_in_place_through_a_view(level, device):
    """Words in the second dimension, as PyTorch's module has them: rows with strides."""
    logits = torch.randn(3, 9, 4, device=device, requires_grad=True)
    target = torch.randint(9, (3, 4), device=device)
    expected = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, target), logits)[0]
    loss = cross_entropy(logits.movedim(1, -1), target, inplace=True, level=level)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], expected)


@pytest.mark.parametrize("level", ["native", "triton"])
def test_not_in_place_where_logits_share_memory(level, device):
    """One row for all tokens: what is written for one would be read for the next."""
    row = torch.randn(1, 9, device=device, requires_grad=True)
    target = torch.tensor([1, 2, 3, 4], device=device)
    before = row.detach().clone()
    expected = torch.autograd.grad(cross_entropy(row.expand(4, 9), target, level="reference"), row)[0]
    loss = cross_entropy(row.expand(4, 9), target, inplace=True, level=level)
    torch.testing.assert_close(torch.autograd.grad(loss, row)[0], expected)
    assert torch.equal(row, before)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [((3, 4), (4, 1), False), ((3, 4), (1, 3), False), ((3, 4), (8, 2), False), ((1, 4), (0, 1), False),
     ((3, 4), (0, 1), True), ((3, 4), (2, 1), True), ((2, 3, 4), (4, 4, 1), True)],
)  # fmt: skip
def test_what_shares_memory(shape, strides, expected):
    assert overlaps_itself(torch.empty_strided(shape, strides)) is expected
