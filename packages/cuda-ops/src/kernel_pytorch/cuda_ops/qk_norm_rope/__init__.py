"""RMSNorm of every head of queries and keys, then rotary position embedding."""

from .operator import qk_norm_rope

__all__ = ["qk_norm_rope"]
