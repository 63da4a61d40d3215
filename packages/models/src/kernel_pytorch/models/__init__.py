"""Whole models built from the fused functions of this project; `techniques=` says which of them a model uses."""

from .block import Attention, FeedForward, TransformerBlock
from .cache import KeyValueCache
from .language_model import LanguageModel
from .sampling import sample
from .techniques import ALL, TechniqueModule, Techniques
from .training import Checkpoints, ShuffledBatches
from .vision_transformer import VisionTransformer

__all__ = [
    "ALL",
    "Attention",
    "Checkpoints",
    "FeedForward",
    "KeyValueCache",
    "LanguageModel",
    "ShuffledBatches",
    "TechniqueModule",
    "Techniques",
    "TransformerBlock",
    "VisionTransformer",
    "sample",
]
