"""Fused operators in CUDA C++, each with a CPU backend, behind PyTorch's stable ABI.

Importing it loads the compiled library; where there is none, ImportError says what is missing and how to get it.
"""

from . import levels
from . import library as _library
from .library import LIBRARY

if _library.refused is not None:
    raise ImportError(_library.refused)
try:
    from .bias_act import bias_act
    from .bias_dropout_add import bias_dropout_add
    from .cross_entropy import cross_entropy
    from .flash_attention import flash_attention
    from .gated import geglu, reglu, swiglu
    from .norm_act import add_layer_norm, add_layer_norm_act, add_rms_norm_act, layer_norm, layer_norm_act, rms_norm_act
    from .qk_norm_rope import qk_norm_rope
    from .rms_norm import add_rms_norm, head_rms_norm, rms_norm
    from .rotary_embedding import rotary_embedding, rotary_qk
    from .softmax import softmax
except ImportError as error:
    _library.refused = str(error)
    raise

__all__ = [
    "LIBRARY",
    "add_layer_norm",
    "add_layer_norm_act",
    "add_rms_norm",
    "add_rms_norm_act",
    "bias_act",
    "bias_dropout_add",
    "cross_entropy",
    "flash_attention",
    "geglu",
    "head_rms_norm",
    "layer_norm",
    "layer_norm_act",
    "levels",
    "qk_norm_rope",
    "reglu",
    "rms_norm",
    "rms_norm_act",
    "rotary_embedding",
    "rotary_qk",
    "softmax",
    "swiglu",
]
