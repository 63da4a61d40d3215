"""Attention without the matrix of scores in memory."""

from .operator import flash_attention

__all__ = ["flash_attention"]
