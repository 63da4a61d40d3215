"""Calls of the public functions, for `tests/test_traceable.py`."""

import torch


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


Q = normal(1, 2, 5, 8)
CALLS = {
    "flash_attention": (lambda f, q, k, v: f(q, k, v, causal=True), (Q, Q + 1, Q + 2)),
    "flash_attention_with_lse": (lambda f, q, k, v: f(q, k, v, softcap=2.0)[0], (Q, Q + 1, Q + 2)),
    "flash_attention_masked": (lambda f, q, k, v, mask: f(q, k, v, mask), (Q, Q + 1, Q + 2, normal(1, 2, 5, 5))),
    "flash_attention_varlen": (
        lambda f, q, k, v, starts: f(q, k, v, starts, starts, 5, 5),
        (normal(5, 2, 8), normal(5, 2, 8) + 1, normal(5, 2, 8) + 2, torch.tensor([0, 2, 5])),
    ),
    "flash_decode": (
        lambda f, new_q, k_cache, v_cache, lengths, table: f(new_q, k_cache, v_cache, lengths, table, window=(4, 0)),
        (
            normal(2, 4, 1, 8),
            normal(5, 2, 3, 8),
            normal(5, 2, 3, 8) + 1,
            torch.tensor([5, 3], dtype=torch.int32),
            torch.tensor([[4, 1], [0, 2]], dtype=torch.int32),
        ),
    ),
    "MultiheadAttention": (lambda m, x: m(x, x, x, need_weights=False)[0], (normal(5, 2, 16),), (16, 2)),
}
