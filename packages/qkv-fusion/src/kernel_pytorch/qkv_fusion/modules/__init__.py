"""The modules, and the KVCache of FusedSelfAttention. `replacements.py` puts them into models."""

from .attention import FusedSelfAttention, KVCache
from .embedding import PatchEmbedding, TokenPositionEmbedding
from .group import LinearGroup
from .projection import QKVProjection
from .table import RotaryTable

__all__ = [
    "FusedSelfAttention",
    "KVCache",
    "LinearGroup",
    "PatchEmbedding",
    "QKVProjection",
    "RotaryTable",
    "TokenPositionEmbedding",
]
