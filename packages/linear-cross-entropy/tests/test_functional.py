"""The public functions: what they compute, and in which dtype. What they refuse is in `test_arguments.py`."""

import pytest
import torch
from torch.nn import functional as F

from kernel_pytorch.linear_cross_entropy import cross_entropy, linear_cross_entropy

LEVELS = ["reference", "native", "torchscript", "triton"]  # "compile" is held by the declaration's tests
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


def problem(device="cpu", dtype=torch.float32, tokens=11, depth=16, words=37):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, depth, device=device, dtype=dtype)
    weight = torch.randn(words, depth, device=device, dtype=dtype) / depth**0.5
    target = torch.randint(words, (tokens,), device=device)
    target[2] = -100
    return hidden, weight, target


# What it computes.


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("level", LEVELS)
def test_it_is_pytorchs_cross_entropy(level, reduction, label_smoothing, device):
    hidden, weight, target = problem(device)
    bias = torch.randn(37, device=device)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    logits = F.linear(hidden, weight, bias)
    expected = F.cross_entropy(logits, target, **options)
    torch.testing.assert_close(
        linear_cross_entropy(hidden, weight, target, bias=bias, level=level, **options), expected
    )
    torch.testing.assert_close(cross_entropy(logits, target, level=level, **options), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_z_loss_and_soft_cap_written_out(level, device):
    hidden, weight, target = problem(device, torch.float64)
    logits = 2.0 * torch.tanh(hidden @ weight.T / 2.0)
    lse = logits.exp().sum(-1).log()
    expected = (lse - logits[torch.arange(11), target.clamp(0)] + 0.1 * lse**2)[target >= 0].sum() / 10
    options = {"z_loss": 0.1, "softcap": 2.0, "level": level}
    ours = linear_cross_entropy(hidden, weight, target, **options)
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=0)
    ours = cross_entropy(hidden @ weight.T, target, **options)
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_loss_is_float32(level, dtype, device):
    hidden, weight, target = problem(device, dtype)
    expected = torch.promote_types(dtype, torch.float32)
    assert linear_cross_entropy(hidden, weight, target, level=level).dtype == expected
    assert cross_entropy(hidden, target % 16, level=level).dtype == expected


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_ignored_is_zero_with_zero_gradients(level, reduction, device):
    hidden, weight, target = problem(device)
    tensors = [hidden.requires_grad_(), weight.requires_grad_(), torch.zeros(37, device=device, requires_grad=True)]
    target.fill_(5)
    loss = linear_cross_entropy(*tensors[:2], target, bias=tensors[2], ignore_index=5, reduction=reduction, level=level)
    assert loss.item() == 0.0
    for gradient in torch.autograd.grad(loss, tensors):
        assert not gradient.any()
    logits = torch.randn(11, 37, device=device, requires_grad=True)
    loss = cross_entropy(logits, target, ignore_index=5, reduction=reduction, level=level)
    assert loss.item() == 0.0
    assert not torch.autograd.grad(loss, logits)[0].any()
    if reduction == "mean":
        assert F.cross_entropy(logits, target, ignore_index=5).isnan()  # what is different on purpose


@pytest.mark.parametrize("level", LEVELS)
def test_a_single_token_and_leading_dimensions(level, device):
    hidden, weight, target = problem(device, tokens=12)
    each = linear_cross_entropy(hidden, weight, target, reduction="none", level=level)
    assert each[2] == 0.0
    one = linear_cross_entropy(hidden[0], weight, target[0], level=level)
    torch.testing.assert_close(one, each[0])
    folded = linear_cross_entropy(hidden.view(3, 4, 16), weight, target.view(3, 4), reduction="none", level=level)
    torch.testing.assert_close(folded, each.view(3, 4))
    torch.testing.assert_close(cross_entropy(hidden[0] @ weight.T, target[0], level=level), each[0])


@pytest.mark.parametrize("level", LEVELS)
def test_losses_of_tokens_may_be_changed_in_place(level, device):
    """As a training loop masks or weighs them."""
    hidden, weight, target = problem(device, tokens=12)
    hidden, target = hidden.view(3, 4, 16).requires_grad_(), target.view(3, 4)
    weights = torch.rand(3, 4, device=device)

    def weighted(function, inplace):
        loss = function(hidden)
        loss = loss.mul_(weights) if inplace else loss * weights
        return torch.autograd.grad(loss.sum(), hidden)[0]

    for function in (
        lambda h: linear_cross_entropy(h, weight, target, reduction="none", level=level),
        lambda h: cross_entropy(h @ weight.T, target, reduction="none", level=level),
    ):
        torch.testing.assert_close(weighted(function, True), weighted(function, False), rtol=0, atol=0)


@pytest.mark.parametrize("level", ["native", "triton"])
def test_the_chunk_does_not_matter(level, device):
    hidden, weight, target = (t.requires_grad_(t.is_floating_point()) for t in problem(device, torch.float64))
    results = []
    for chunk in (None, 1, 5, 37, 1000):
        loss = linear_cross_entropy(hidden, weight, target, chunk=chunk, label_smoothing=0.1, z_loss=0.1, level=level)
        results.append([loss, *torch.autograd.grad(loss, (hidden, weight))])
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "layout", ["transposed hidden", "transposed weight", "every second column", "one row repeated"]
)
def test_any_strides(layout, level, device):
    hidden, weight, target = problem(device, words=40)
    if layout == "transposed hidden":
        hidden = hidden.t().contiguous().t()
    elif layout == "transposed weight":
        weight = weight.t().contiguous().t()
    elif layout == "every second column":
        hidden = hidden.repeat_interleave(2, 1)[:, ::2]
    else:
        hidden = hidden[:1].expand(11, 16)
    tensors = hidden.requires_grad_(), weight.requires_grad_()
    incoming = torch.randn(22, device=device)[::2]
    found, expected = (
        torch.autograd.grad(linear_cross_entropy(*tensors, target, reduction="none", level=name), tensors, incoming)
        for name in (level, "reference")
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of Triton's interpreter
def test_infinite_logits_are_as_in_pytorch(device):
    """Words that a model rules out."""
    logits = torch.randn(6, 40, device=device)
    logits[:, ::3] = float("-inf")
    logits[1] = float("-inf")
    target = torch.ones(6, dtype=torch.int64, device=device)
    target[1] = -100
    logits.requires_grad_()
    expected = F.cross_entropy(logits, target)
    (gradient,) = torch.autograd.grad(expected, logits)
    for level in LEVELS:
        loss = cross_entropy(logits, target, level=level)
        torch.testing.assert_close(loss, expected)
        rows = [0, 2, 3, 4, 5]  # of the row of nothing but -inf the reference's gradient is NaN times zero
        torch.testing.assert_close(torch.autograd.grad(loss, logits)[0][rows], gradient[rows])


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of Triton's interpreter
@pytest.mark.parametrize("level", ["native", "triton"])
def test_a_token_that_is_ignored_may_be_anything(level, device):
    hidden, weight, target = problem(device)
    hidden[2] = float("nan")
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target, level=level)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert not gradient[2].any()


@pytest.mark.parametrize("words", [32_000, 128_256, 256_000])
def test_the_vocabularies_of_models(words, device):
    """Triton's interpreter takes half a minute for a product of this size, and the logits alone a second."""
    hidden, weight, target = problem(device, words=words)
    target[0], target[1] = words - 1, 0
    tensors = hidden.requires_grad_(), weight.requires_grad_()
    of_layer = {
        level: linear_cross_entropy(*tensors, target, level=level)
        for level in ("reference", "native", *(["triton"] if device.type == "cuda" else []))
    }
    of_logits = {
        level: cross_entropy((hidden @ weight.T)[:3], target[:3], level=level)
        for level in ("reference", "native", "triton")
    }
    for losses in (of_layer, of_logits):
        expected = torch.autograd.grad(losses["reference"], tensors, retain_graph=True)
        for loss in losses.values():
            torch.testing.assert_close(loss, losses["reference"])
            for ours, theirs in zip(torch.autograd.grad(loss, tensors, retain_graph=True), expected, strict=True):
                torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("level", ["reference", "native", "triton"])
def test_the_loss_of_many_words_is_exact_to_the_last_places(level, device):
    """On a CPU PyTorch's own cross entropy is off by six units in the last place here."""
    torch.manual_seed(0)
    logits = 4.0 * torch.randn(16, 128_256, device=device)
    target = torch.randint(128_256, (16,), device=device)
    truth = F.cross_entropy(logits.double(), target)
    assert abs(cross_entropy(logits, target, level=level).item() - truth.item()) < 2e-7 * truth.item()


def test_default_is_native_on_the_cpu():
    hidden, weight, target = problem()
    assert torch.equal(
        linear_cross_entropy(hidden, weight, target), linear_cross_entropy(hidden, weight, target, level="native")
    )


@pytest.mark.parametrize("level", ["reference", "native", "triton"])
def test_autocast_casts_as_a_linear_layer_does(level, device):
    hidden, weight, target = problem(device)
    expected = linear_cross_entropy(hidden.half(), weight.half(), target, level=level)
    weight.requires_grad_()
    with torch.autocast(device.type, torch.float16):
        loss = linear_cross_entropy(hidden, weight, target, level=level)
        # A reference under autocast has logits of 16 bits, as F.linear gives.
        torch.testing.assert_close(loss, expected, rtol=1e-3 if level == "reference" else 1e-6, atol=0)
        doubled = linear_cross_entropy(hidden.double(), weight.detach().double(), target, level=level)
    assert doubled.dtype == torch.float64
    assert loss.dtype == torch.float32
    assert torch.autograd.grad(loss, weight)[0].dtype == torch.float32


@pytest.mark.slow
def test_the_limit_of_a_compiler_says_what_to_do():
    hidden, weight, target = problem()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        cross_entropy(hidden, target % 16, reduction="sum", level="compile")
        with pytest.raises(RuntimeError, match=r"'compile' of cross_entropy.*at most 1 times.*config\.recompile_limit"):
            cross_entropy(hidden, target % 16, reduction="none", level="compile")
        linear_cross_entropy(hidden, weight, target, reduction="sum", level="compile")
        with pytest.raises(RuntimeError, match=r"'compile' of linear_cross_entropy.*at most 1 times"):
            linear_cross_entropy(hidden, weight, target, reduction="none", level="compile")
    torch._dynamo.reset()
