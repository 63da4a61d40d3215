"""The Decoder: generation with a causal model of Hugging Face's transformers, one fused step for each token."""

from .decoder import Decoder

__all__ = ["Decoder"]
