"""How exact gradients are: of large scores, beside which the logarithm of a sum is lost; those of level "triton" in
float32, where the rounding of lse was the largest error, and of tokens that are much alike, beside PyTorch's.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kernel_pytorch.flash_attn_triton import (
    flash_attention,
    flash_attention_masked,
    flash_attention_varlen,
    flash_attention_with_lse,
)
from kernel_pytorch.flash_attn_triton.levels import LADDER
from kernel_pytorch.flash_attn_triton.technique.inputs import flash_attention_real
from kernel_pytorch.harness.adversaries import imitated_activations

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),  # beyond the last key
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 6 * 2.0**-23  # exponentials and logarithms of a GPU are approximations


def alike(score, keys):
    """A query that has this score with all keys, whose weights are exactly one part of their number each."""
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, keys, 16)
    q[..., 0], k[..., 0] = score, 1.0
    generator = torch.Generator().manual_seed(0)
    v, do = (torch.randn(shape, generator=generator) for shape in (k.shape, q.shape))
    return [t.to(DEVICE) for t in (q, k, v, do)]


LEVELS = [None, "reference", "native", "torchscript", pytest.param("compile", marks=pytest.mark.slow), "triton"]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("masked", [-1e9, 3e7, -3.0e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_of_rows_that_a_mask_makes_large(level, masked, dtype):
    """As padding of a tokenizer does of a whole row: weights of a query sum to one in the backward too."""
    if level == "triton" and masked < -2e38:
        pytest.skip("it counts as -inf there, as the page says")
    q, k, v = (torch.randn(1, 2, n, 16).to(DEVICE, dtype).requires_grad_() for n in (2, 64, 64))
    mask = torch.zeros(1, 1, 2, 64, device=DEVICE)
    mask[:, :, 0] = masked
    o = flash_attention_masked(q, k, v, mask.requires_grad_(), level=level)
    dq, dk, dv, dmask = torch.autograd.grad(o.float().sum(), (q, k, v, mask))
    torch.testing.assert_close(dv.float().sum(2), torch.full((1, 2, 16), 2.0, device=DEVICE), rtol=4e-3, atol=0.0)
    assert dmask.float().sum(-1).abs().max() < 4e-2
    assert max(g.float().abs().max() for g in (dq, dk, dmask)) < 10.0


@pytest.mark.parametrize("level", ["reference", "torchscript", "cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_of_scores_that_are_all_large(level, dtype):
    """One large channel, as models without a norm of queries and keys grow it; PyTorch's backward multiplies by 32."""
    if reason := LADDER.unavailable(level, torch.device(DEVICE), dtype):
        pytest.skip(reason)
    q, k, v = (torch.randn(1, 2, n, 16).to(DEVICE, dtype) for n in (4, 32, 32))
    q[..., 0], k[..., 0] = 3e4, -3e4
    v.requires_grad_()
    flash_attention(q, k, v, level=level).float().sum().backward()
    torch.testing.assert_close(v.grad.float().sum(2), torch.full((1, 2, 16), 4.0, device=DEVICE), rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("score", [1e5, -1e9])
def test_gradients_of_sinks_and_lse_beside_large_scores(score):
    """Of equal scores: the sink takes a share like a key's where it is as large, and all or nothing elsewhere."""
    q, k, v, do = alike(score, 8)
    sinks = torch.tensor([float(score)], device=DEVICE).requires_grad_()
    k.requires_grad_()
    for level in ("reference", "triton"):
        o, lse = flash_attention_with_lse(q, k, v, scale=1.0, sinks=sinks, level=level)
        found = torch.autograd.grad((o, lse), (sinks, k), (do, torch.ones_like(lse)))
        torch.testing.assert_close(found[1][..., 1:], torch.zeros_like(found[1][..., 1:]))
        expected = 1.0 / 9.0 - (o.detach() * do).sum() / 9.0
        torch.testing.assert_close(found[0], expected[None], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("score", [50.0, 63.0, 80.0])
@pytest.mark.parametrize("packed", [False, True])
def test_weights_are_those_of_the_sum_and_not_of_its_rounded_logarithm(score, packed):
    q, k, v, do = alike(score, 200)
    v.requires_grad_()
    if packed:
        ends = [torch.tensor([0, n], device=DEVICE, dtype=torch.int32) for n in (1, 200)]
        tokens = (t[0].transpose(0, 1) for t in (q, k, v))
        o = flash_attention_varlen(*tokens, *ends, 1, 200, scale=1.0, level="triton").transpose(0, 1)[None]
    else:
        o, _ = flash_attention_with_lse(q, k, v, scale=1.0, level="triton")
    (dv,) = torch.autograd.grad(o, v, do)
    exact = (do.double() / 200).expand_as(dv)
    assert ((dv.double() - exact).abs() <= LIMIT * exact.abs()).all()


def test_the_gradient_of_lse_is_as_exact():
    q, k, v, do = alike(63.0, 200)
    k.requires_grad_()
    o, lse = flash_attention_with_lse(q, k, v, scale=1.0, level="triton")
    (dk,) = torch.autograd.grad((o, lse), k, (torch.zeros_like(do), torch.ones_like(lse)))
    exact = (q.double() / 200).expand_as(dk)
    assert ((dk.double() - exact).abs() <= LIMIT * exact.abs()).all()


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_tokens_that_are_alike_are_as_exact_as_pytorch_s(seed):
    """Gradients of scores cancel there, and what rounds them to 16 bits for a product loses digits."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter computes bfloat16 wrongly
    heads, _ = flash_attention_real(imitated_activations(seed, tokens=128), dtype)
    q, k, v = (t[:, :2].to(DEVICE) for t in heads)
    do = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)).to(q)

    def gradients(attend, *tensors):
        tensors = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(attend(*tensors), tensors, do.to(tensors[0].dtype))

    exact = gradients(sdpa, *(t.double() for t in (q, k, v)))
    theirs = gradients(sdpa, q, k, v)
    ours = gradients(lambda *tensors: flash_attention(*tensors, level="triton"), q, k, v)
    for mine, reference, truth in zip(ours, theirs, exact, strict=True):
        assert (mine - truth).abs().max() <= 2.0 * (reference - truth).abs().max()
