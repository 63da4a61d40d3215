"""Whole models built from the fused functions of this project; `techniques=` says which of them a model uses."""

from .block import Attention, FeedForward, TransformerBlock
from .cache import KeyValueCache
from .language_model import LanguageModel
from .sampling import sample
from .techniques import ALL, TechniqueModule, Techniques

__all__ = [
    "ALL",
    "Attention",
    "FeedForward",
    "KeyValueCache",
    "LanguageModel",
    "TechniqueModule",
    "Techniques",
    "TransformerBlock",
    "sample",
]
