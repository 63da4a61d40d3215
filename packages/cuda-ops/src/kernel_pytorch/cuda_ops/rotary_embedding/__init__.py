"""Rotary position embedding of the heads of queries or keys."""

from .operator import rotary_embedding

__all__ = ["rotary_embedding"]
