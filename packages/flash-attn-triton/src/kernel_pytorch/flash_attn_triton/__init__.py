"""Exact attention without the matrix of scores in memory, forward and backward."""

from .functional import (
    flash_attention,
    flash_attention_masked,
    flash_attention_varlen,
    flash_attention_with_lse,
    flash_decode,
)
from .module import MultiheadAttention
from .replacements import patch, unpatch

__all__ = [
    "MultiheadAttention",
    "flash_attention",
    "flash_attention_masked",
    "flash_attention_varlen",
    "flash_attention_with_lse",
    "flash_decode",
    "patch",
    "unpatch",
]
