"""Memory: logits are never all there, and nothing of their size is kept for the backward."""

import pytest
import torch
from torch.nn import functional as F

from kernel_pytorch.harness.memory import peak, profile_memory
from kernel_pytorch.linear_cross_entropy import cross_entropy, linear_cross_entropy
from kernel_pytorch.linear_cross_entropy.kernels import chunked, chunks

TOKENS, WORDS, DEPTH = 256, 4096, 32


def composed(hidden, weight, target):
    """What a model does that has no better."""
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def arguments(device, dtype=torch.float32):
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, DEPTH, device=device), torch.randn(WORDS, DEPTH, device=device) * 0.1
    return hidden.to(dtype), weight.to(dtype), torch.randint(WORDS, (TOKENS,), device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_takes_less_than_a_quarter(dtype, device, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**18)  # as 64 MiB are to 128,000 words
    tensors = arguments(device, dtype)
    plain = profile_memory(composed, *tensors)
    ours = profile_memory(lambda *t: linear_cross_entropy(*t, level="native"), *tensors)
    assert ours.training_peak < 0.25 * plain.training_peak
    assert ours.forward_peak < 0.25 * plain.forward_peak
    held = profile_memory(lambda *t: linear_cross_entropy(*t, level="native", chunk=WORDS), *tensors)
    assert held.training_peak > 0.25 * plain.training_peak  # what one chunk of everything would show


@pytest.mark.parametrize("level", ["native", "triton"])
def test_saved_for_the_backward(level, device):
    """The gradients, and what the mean is divided by."""
    hidden, weight, target = arguments(device)
    use = profile_memory(
        lambda h, w, t: linear_cross_entropy(h, w, t, level=level), hidden[:40], weight[:100], target[:40] % 100
    )
    assert use.saved_for_backward <= (40 + 100) * DEPTH * 4 + 16


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"chunk": 50}], ids=str)
@pytest.mark.parametrize("level", ["native", "triton"])
def test_saved_where_logits_are_computed_again(level, options, device):
    """Two numbers a token: the largest logit, and the logarithm of the sum of exponentials relative to it."""
    hidden, weight, target = arguments(device)
    use = profile_memory(
        lambda h, w, t: linear_cross_entropy(h, w, t, level=level, **options),
        hidden[:40],
        weight[:100],
        target[:40] % 100,
    )
    assert use.saved_for_backward <= 2 * 4 * 40 + 8  # and what the mean is divided by


@pytest.mark.parametrize("level", ["native", "triton"])
def test_in_place_saves_a_tensor_of_logits(level, device, monkeypatch):
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 4096)  # what native computes in
    # A GPU hands out 512 bytes at least, so that every little tensor shows beside few logits.
    source, target = torch.randn(64, 512, device=device), torch.randint(512, (64,), device=device)
    source.requires_grad_()

    def backward_peak(inplace):
        graphs = []
        for _ in range(2):  # `peak` calls twice, and a graph whose logits are gone serves once
            logits = source * 1.0
            graphs.append((cross_entropy(logits, target, inplace=inplace, level=level), logits))
        return peak(lambda: torch.autograd.grad(*graphs.pop()), device)

    size = source.numel() * 4
    assert backward_peak(False) >= size
    assert backward_peak(True) < 0.2 * size


def test_the_size_of_a_chunk():
    mib = 2**20
    assert chunks.words_at_a_time(4096, 128256, 4, 0) == 64 * mib // (4 * 4096)
    assert chunks.words_at_a_time(4096, 128256, 2, 0) == 64 * mib // (2 * 4096)
    assert chunks.words_at_a_time(8, 50257, 4, 0) == 50257  # they all fit
    assert chunks.words_at_a_time(10**6, 50257, 4, 0) == chunks.FEWEST_WORDS
    assert chunks.words_at_a_time(4096, 128256, 4, 1000) == 1000
    assert chunks.words_at_a_time(0, 5, 4, 0) == 5
    assert chunks.words_at_a_time(4097, 128256, 4, 0) % chunks.WORDS == 0
