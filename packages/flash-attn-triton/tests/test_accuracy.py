"""How exact the gradients of level "triton" are: in float32, where the rounding of lse was the largest error, and of
tokens that are much alike, beside PyTorch's.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kernel_pytorch.flash_attn_triton import flash_attention, flash_attention_varlen, flash_attention_with_lse
from kernel_pytorch.flash_attn_triton.technique.inputs import flash_attention_real
from kernel_pytorch.harness.real_input import imitated_activations

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = 6 * 2.0**-23  # exponentials and logarithms of a GPU are approximations


def alike(score, keys):
    """A query that has this score with all keys, whose weights are exactly one part of their number each."""
    q, k = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, keys, 16)
    q[..., 0], k[..., 0] = score, 1.0
    generator = torch.Generator().manual_seed(0)
    v, do = (torch.randn(shape, generator=generator) for shape in (k.shape, q.shape))
    return [t.to(DEVICE) for t in (q, k, v, do)]


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
