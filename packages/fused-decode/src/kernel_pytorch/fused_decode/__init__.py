"""Generation one token at a time, at the speed with which the weights can be read."""

from .decoder import Decoder

__all__ = ["Decoder"]
