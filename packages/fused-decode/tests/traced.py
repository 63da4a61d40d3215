"""Calls of the public functions, for the tests of all packages in `tests/test_traceable.py`."""

import torch


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


X, WEIGHT, ROW = normal(3, 16), normal(24, 16), normal(16)
TURNS, LENGTHS = normal(9, 4), torch.tensor([0, 8, -1], dtype=torch.int32)


def without_gradient(function, *given, **options):
    """What is computed; it has no gradient: those of all that is given are added, and are zero."""
    found = function(*(t.detach() for t in given), **options)
    return found + sum(t.sum() for t in given) * 0


def into_caches(function, *given):
    """What is computed, and what is in both caches."""
    qkv, k_cache, v_cache, *others = (t.detach() for t in given)
    caches = k_cache.clone(), v_cache.clone()
    found = function(qkv, *caches, *others, num_heads=4)
    return (*(t + sum(g.sum() for g in given) * 0 for t in (found, *caches)),)


NOT_TRACED = {"report": "it reads a model"}
CALLS = {
    "norm_linear": (lambda f, x, w, n, b: without_gradient(f, x, w, n, b), (X, WEIGHT, ROW, normal(24))),
    "norm_gated_linear": (lambda f, x, w, n: without_gradient(f, x, w, n, norm="layer"), (X, WEIGHT, ROW)),
    "linear_residual": (lambda f, x, w, r: without_gradient(f, x, w, r), (X, WEIGHT, normal(3, 24))),
    "rotary_cache_attention": (
        lambda f, qkv, k_cache, v_cache, lengths, cos, sin: into_caches(
            f, qkv, k_cache, v_cache, lengths, cos.detach().float(), sin.detach().float()
        ),
        (normal(3, 64), normal(3, 2, 9, 8), normal(3, 2, 9, 8), LENGTHS, TURNS, TURNS),
    ),
}
