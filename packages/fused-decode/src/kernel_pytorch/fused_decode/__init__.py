"""Generation by decoder-only transformers: a step of few tokens, bound by reading weights and cache once."""

from .functional import linear_residual, norm_gated_linear, norm_linear, rotary_cache_attention

__all__ = ["linear_residual", "norm_gated_linear", "norm_linear", "rotary_cache_attention"]
