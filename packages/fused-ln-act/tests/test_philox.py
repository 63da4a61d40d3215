"""The dropout mask: what Philox gives, what Triton gives, and what dropout makes of it."""

import math

import pytest
import torch

from kernel_pytorch.fused_ln_act import add_layer_norm, layer_norm_act
from kernel_pytorch.fused_ln_act._core.philox import dropout, keep, philox
from kernel_pytorch.fused_ln_act.arguments import draw_seed

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from kernel_pytorch.fused_ln_act.kernels import dropout as triton_dropout  # noqa: E402


@triton.jit
def _words_kernel(seed_ptr, counter_ptr, words_ptr, uniform_ptr, N: tl.constexpr):
    place = tl.arange(0, N)
    counter = tl.load(counter_ptr + place)
    seed = tl.load(seed_ptr)
    a, b, c, d = tl.randint4x(seed, counter)
    tl.store(words_ptr + place, a.to(tl.int64))
    tl.store(words_ptr + N + place, b.to(tl.int64))
    tl.store(words_ptr + 2 * N + place, c.to(tl.int64))
    tl.store(words_ptr + 3 * N + place, d.to(tl.int64))
    tl.store(uniform_ptr + place, tl.rand(seed, counter))


@triton.jit
def _dropout_kernel(seed_ptr, x_ptr, y_ptr, first, columns, P: tl.constexpr, LONG: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    row = first + tl.program_id(0)
    if LONG:
        row = row.to(tl.int64)
    place = tl.program_id(0) * columns + column
    x = tl.load(x_ptr + place, mask=column < columns, other=0.0)
    y = triton_dropout.dropout(x, tl.load(seed_ptr), row, column, columns, P)
    tl.store(y_ptr + place, y, mask=column < columns)


def test_known_answers():
    """The vectors that Random123 is distributed with (kat_vectors, philox4x32 10)."""
    words = philox(torch.tensor(0), torch.tensor([0]))
    assert [f"{int(w):08x}" for w in words] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -3])
@pytest.mark.parametrize("first", [0, 2**31 - 7, 2**32 - 3, 2**40 + 5])
def test_words_are_those_of_triton(seed, first, device):
    counter = torch.arange(first, first + 16, device=device)
    key = torch.tensor(seed, device=device)
    words = torch.empty(4, 16, dtype=torch.int64, device=device)
    uniform = torch.empty(16, device=device)
    _words_kernel[(1,)](key, counter, words, uniform, N=16)
    assert torch.equal(words, torch.stack(philox(key, counter)))
    # And so the first word makes the uniform numbers of tl.rand.
    first_word = words[0].to(torch.int32)
    folded = torch.where(first_word < 0, -first_word - 1, first_word)
    assert torch.equal(uniform, folded.float() * 4.6566127342e-10)


@pytest.mark.parametrize("columns", [1, 4, 33])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_kernels_draw_the_mask_of_the_definition(columns, p, device):
    x, seed = torch.randn(7, columns, device=device), torch.tensor(12345678901234567, device=device)
    y = torch.empty_like(x)
    _dropout_kernel[(7,)](seed, x, y, 0, columns, P=p, LONG=False, BLOCK=64)
    assert torch.equal(y, dropout(x, seed, p))


def test_places_beyond_32_bits(device):
    """Row 2**31 of eight columns: its counter needs 33 bits."""
    x, seed = torch.ones(1, 8, device=device), torch.tensor(7, device=device)
    y = torch.empty_like(x)
    _dropout_kernel[(1,)](seed, x, y, 2**31, 8, P=0.5, LONG=True, BLOCK=8)
    words = torch.stack(philox(seed, torch.tensor([2**32, 2**32 + 1], device=device)), -1).flatten()
    assert torch.equal(y[0] > 0, (words >> 1) >= 2**30)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_mean_and_variance(p):
    """Over n elements within five standard deviations; and neighbours do not know each other."""
    n = 2**20
    kept = keep(torch.empty(1024, 1024), torch.tensor(1), p).double()
    deviation = math.sqrt(p * (1 - p) / n)
    assert abs(kept.mean().item() - (1 - p)) < 5 * deviation
    y = dropout(torch.ones(1024, 1024, dtype=torch.float64), torch.tensor(2), p)
    variance = p / (1 - p)
    assert abs(y.mean().item() - 1.0) < 5 * math.sqrt(variance / n)
    fourth = (1 - p) * (1 / (1 - p) - 1) ** 4 + p  # central moment of a kept or dropped one
    # The last term is the bias of the second order, all there is at p = 0.5.
    assert abs(y.var().item() - variance) < 5 * math.sqrt((fourth - variance**2) / n) + 25 * variance / n
    centred = kept - (1 - p)
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(2, 1)):
        assert abs((centred * other).mean().item()) < 5 * p * (1 - p) / math.sqrt(n)


def test_a_constant_word_would_be_found():
    """The bounds above are not so wide that a mask repeated in every row passes."""
    kept = keep(torch.empty(1024, 1024), torch.tensor(1), 0.5)[:1].expand(1024, 1024).double() - 0.5
    assert abs((kept * kept.roll(1, 0)).mean().item()) > 5 * 0.25 / 1024


def test_seeds_differ():
    x = torch.empty(64, 64)
    a, b = keep(x, torch.tensor(1), 0.5), keep(x, torch.tensor(2**32 + 1), 0.5)
    assert 0.4 < (a == b).double().mean() < 0.6


def test_manual_seed_repeats_and_calls_differ(device):
    x, r = torch.randn(9, 32, device=device), torch.randn(9, 32, device=device)
    for level in ("reference", "native", "triton"):
        torch.manual_seed(3)
        first, second = (add_layer_norm(x, r, dropout_p=0.5, level=level)[1] for _ in range(2))
        torch.manual_seed(3)
        assert torch.equal(first, add_layer_norm(x, r, dropout_p=0.5, level=level)[1])
        assert not torch.equal(first, second)


@pytest.mark.slow
def test_levels_draw_one_mask_for_one_seed(device):
    x, seed = torch.randn(9, 32, device=device), draw_seed(device)
    masks = [
        layer_norm_act(x, activation="sigmoid", dropout_p=0.4, seed=seed, level=level) == 0
        for level in ("reference", "native", "torchscript", "compile", "triton")
    ]
    assert all(torch.equal(mask, masks[0]) for mask in masks)


@pytest.mark.parametrize("level", ["reference", "native", "triton"])
def test_checkpointing_repeats_the_mask(level, device):
    x = torch.randn(9, 32, device=device, requires_grad=True)
    residual = torch.randn(9, 32, device=device)

    def block(x):
        return add_layer_norm(x, residual, dropout_p=0.5, level=level)[0]

    torch.manual_seed(0)
    (plain,) = torch.autograd.grad(block(x).sin().sum(), x)
    torch.manual_seed(0)
    y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    (recomputed,) = torch.autograd.grad(y.sin().sum(), x)
    assert torch.equal(plain, recomputed)
