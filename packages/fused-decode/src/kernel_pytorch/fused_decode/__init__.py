"""Generation one token at a time, at the speed with which the weights can be read."""

from .decoder import Decoder
from .functional import linear_residual, norm_gated_linear, norm_linear, rotary_cache_attention
from .replacements import patch, report, unpatch

__all__ = [
    "Decoder",
    "linear_residual",
    "norm_gated_linear",
    "norm_linear",
    "patch",
    "report",
    "rotary_cache_attention",
    "unpatch",
]
