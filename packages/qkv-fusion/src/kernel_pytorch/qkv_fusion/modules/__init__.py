"""The modules. `replacements.py` puts them into models; beside FusedSelfAttention is its KVCache."""

from .attention import FusedSelfAttention
from .embedding import PatchEmbedding, TokenPositionEmbedding
from .group import LinearGroup
from .projection import QKVProjection
from .table import RotaryTable

__all__ = [
    "FusedSelfAttention",
    "LinearGroup",
    "PatchEmbedding",
    "QKVProjection",
    "RotaryTable",
    "TokenPositionEmbedding",
]
