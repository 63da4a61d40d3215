"""Generation one token at a time, at the speed with which the weights can be read."""

from .decoder import Decoder
from .replacements import patch, report, unpatch

__all__ = ["Decoder", "patch", "report", "unpatch"]
