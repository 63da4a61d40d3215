"""Large logits, NaN and infinities: what offsets cost, and what has to be passed on."""

import pytest
import torch
from torch.nn import functional as F

from kernel_pytorch.linear_cross_entropy import cross_entropy, linear_cross_entropy
from kernel_pytorch.linear_cross_entropy.levels import LADDER

LEVELS = ["reference", "native", "torchscript", "triton", "cuda"]
NAN, INF = float("nan"), float("inf")
IGNORED = 3
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


def problem(device, words=193):
    torch.manual_seed(0)
    logits = 4.0 * torch.randn(9, words, device=device)
    target = torch.randint(words, (9,), device=device)
    target[IGNORED] = -100
    return logits, target


def results(function, rows, target, level, **options):
    """Losses and their gradient."""
    if level == "cuda" and (reason := LADDER.unavailable(level, rows.device, rows.dtype)):
        pytest.skip(reason)
    rows = rows.detach().requires_grad_()
    loss = function(rows, target, reduction="none", level=level, **options)
    (gradient,) = torch.autograd.grad(loss, rows, torch.ones_like(loss))
    return loss.detach(), gradient


def errors(found, truth):
    return [(ours.double() - exact).abs().max().item() for ours, exact in zip(found, truth, strict=True)]


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.3}], ids=["plain", "smoothed"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_common_offset_costs_no_digits(level, inplace, options, device):
    """The differences are exact: those of the rounded logits, without their offset, in float64."""
    logits, target = problem(device)
    for offset in (0.0, 100.0, -1e3, 1e5):
        moved = logits + offset
        truth = results(cross_entropy, moved.double() - offset, target, "reference", **options)
        loss, gradient = errors(results(cross_entropy, moved, target, level, inplace=inplace, **options), truth)
        assert loss < 4e-6, offset
        assert gradient < 5e-7, offset


@pytest.mark.parametrize("options", [{"z_loss": 1e-3, "label_smoothing": 0.1}, {"softcap": 30.0}], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_other_terms_of_large_logits(level, options, device):
    """They are not invariant, but lose no more than float32 does of a logit."""
    logits, target = problem(device)
    moved = logits + 1e3
    truth = results(cross_entropy, moved.double(), target, "reference", **options)
    loss, gradient = errors(results(cross_entropy, moved, target, level, **options), truth)
    assert loss < 4e-7 * truth[0].abs().max().item() + 4e-6
    assert gradient < 2e-6


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("level", ["reference", "native", "torchscript", "triton"])
def test_a_linear_layer_with_large_logits(level, smoothing, device):
    """Small integers, so that logits are exact, and one column that adds 1,000 to all words of a token."""
    torch.manual_seed(0)
    hidden, weight = torch.randint(-1, 2, (7, 8), device=device), torch.randint(-1, 2, (70, 8), device=device)
    hidden[:, 0], weight[:, 0] = 1000, 1
    target = torch.randint(70, (7,), device=device)

    def layer(rows, target, **options):
        return linear_cross_entropy(rows, weight.to(rows.dtype), target, label_smoothing=smoothing, **options)

    truth = results(layer, hidden.double(), target, "reference")
    loss, gradient = errors(results(layer, hidden.float(), target, level), truth)
    assert loss < 2e-6
    assert gradient < 2e-6


@pytest.mark.parametrize("words", [5, 193, 5000, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("level", LEVELS)
def test_nan_and_infinity_are_those_of_pytorch(level, dtype, words, device):
    """In the first block of a row, in the last, and everywhere; next to clean rows; the kernels' parts are joined."""
    logits, target = problem(device, words)
    logits[1, 2] = logits[2, -1] = logits[4] = NAN
    logits[5, -1] = INF
    logits[6, 1:3] = -INF
    target[6] = 0
    logits[7], logits[8, 0] = -INF, -INF
    target[8] = 0
    logits = logits.to(dtype)
    wide = logits.float().requires_grad_()
    expected = F.cross_entropy(wide, target, reduction="none")
    (expected_gradient,) = torch.autograd.grad(expected, wide, torch.ones_like(expected))
    loss, gradient = results(cross_entropy, logits, target, level)
    assert loss.isnan().tolist() == [False, True, True, False, True, True, False, True, False]
    assert loss[8] == INF
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(gradient.float(), expected_gradient, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("words", [37, 193])
@pytest.mark.parametrize("level", ["reference", "native", "torchscript", "triton"])
def test_nan_and_infinity_of_a_linear_layer(level, words, device):
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 16, device=device), torch.randn(words, 16, device=device)
    target = torch.randint(words, (9,), device=device)
    hidden[1, 3], hidden[4] = NAN, NAN
    hidden[7, 5] = INF

    def layer(rows, target, **options):
        return linear_cross_entropy(rows, weight, target, **options)

    loss, gradient = results(layer, hidden, target, level)
    poisoned = [False, True, False, False, True, False, False, True, False]
    assert loss.isnan().tolist() == poisoned
    assert gradient.isnan().any(1).tolist() == poisoned
    clean = ~torch.tensor(poisoned, device=device)
    expected = results(layer, hidden[clean], target[clean], "reference")
    for found, exact in zip((loss[clean], gradient[clean]), expected, strict=True):
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("level", LEVELS)
def test_an_ignored_token_has_no_gradient_whatever_its_logits(level, device):
    """PyTorch's own, which level "native" is on a GPU, multiplies by zero, and NaN stays."""
    logits, target = problem(device)
    logits[IGNORED] = NAN
    loss, gradient = results(cross_entropy, logits, target, level)
    assert loss[IGNORED] == 0.0
    assert not gradient[IGNORED].any() or (level == "native" and device.type == "cuda")
    assert gradient.isfinite().all(1).sum() >= 8


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_of_zero_leaves_the_nan_of_a_token_that_counts(level, device):
    logits, target = problem(device)
    logits[1, 2] = NAN
    logits.requires_grad_()
    if level == "cuda" and (reason := LADDER.unavailable(level, logits.device, logits.dtype)):
        pytest.skip(reason)
    loss = cross_entropy(logits, target, reduction="none", level=level)
    (gradient,) = torch.autograd.grad(loss, logits, torch.zeros_like(loss))
    assert gradient[1].isnan().all()
    assert not gradient[[0, 2, 3, 4, 5, 6, 7, 8]].any()
