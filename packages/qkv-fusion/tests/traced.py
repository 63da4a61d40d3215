"""Calls of the public functions and modules, for the tests of all packages in `tests/test_traceable.py`."""

import torch


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


Q, K, TURNS, POSITIONS = normal(2, 5, 4, 8), normal(2, 5, 2, 8), normal(5, 4), torch.tensor([4, 0, 1, 1, 3])
X, WEIGHT, ROW = normal(2, 5, 16), normal(8 * 8, 16), normal(8)
LENGTHS = torch.tensor([0, 3], dtype=torch.int32)


def into_caches(function, *given):
    """What is in q and in both caches; it has no gradient: those of all that is given are added, and are zero."""
    x, weight, q_weight, k_weight, cos, sin, k_cache, v_cache, lengths = (t.detach() for t in given)
    caches = k_cache.clone(), v_cache.clone()
    q = function(x, weight, None, q_weight, k_weight, cos, sin, *caches, lengths, num_heads=4)
    return (*(t + sum(g.sum() for g in given) * 0 for t in (q, *caches)),)


CALLS = {
    "rotary_embedding": (
        lambda f, q, k, cos, sin, positions: f(q, k, cos, sin, position_ids=positions),
        (Q, K, TURNS, TURNS, POSITIONS),
    ),
    "rotary_embedding_": (  # it has no gradient: those of q and k are added, and are zero
        lambda f, q, k, cos, sin: f(q.detach().clone(), k.detach().clone(), cos, sin)[0] + q * 0 + k.sum() * 0,
        (Q, K, TURNS, TURNS),
    ),
    "qk_norm_rope": (lambda f, q, k, qw, kw, cos, sin: f(q, k, qw, kw, cos, sin), (Q, K, ROW, ROW, TURNS, TURNS)),
    "qk_layer_norm_rope": (lambda f, q, k, qw, kw, cos, sin: f(q, k, qw, kw, cos, sin), (Q, K, ROW, ROW, TURNS, TURNS)),
    "qkv_projection": (lambda f, x, w: f(x, w, num_heads=4, num_kv_heads=2, head_dim=8), (X, WEIGHT)),
    "qkv_norm_rope": (
        lambda f, x, w, qw, kw, cos, sin: f(x, w, None, qw, kw, cos, sin, num_heads=4, num_kv_heads=2),
        (X, WEIGHT, ROW, ROW, TURNS, TURNS),
    ),
    "qkv_norm_rope_cache_": (
        lambda f, x, w, qw, kw, cos, sin, k_cache, v_cache, n: into_caches(
            f, x, w, qw, kw, cos, sin, k_cache, v_cache, n
        ),
        (X, WEIGHT, ROW, ROW, TURNS, TURNS, normal(2, 2, 9, 8), normal(2, 2, 9, 8), LENGTHS),
    ),
    "LinearGroup": (lambda m, x: m(x), (X,), (16, {"gate": 8, "up": 4})),
    "QKVProjection": (lambda m, x: m(x), (X,), (16, 4, 2)),
    "FusedSelfAttention": (lambda m, x: m(x, is_causal=True), (X,), (16, 4, 2)),
    "RotaryTable": (lambda m, x, positions: m(positions)[0] * x, (TURNS, POSITIONS), (8,)),
    "TokenPositionEmbedding": (lambda m, ids: m(ids), (POSITIONS,), (torch.nn.Embedding(9, 8),)),
    "PatchEmbedding": (lambda m, x: m(x), (normal(2, 3, 8, 8),), (torch.nn.Conv2d(3, 8, 4, 4),)),
}
