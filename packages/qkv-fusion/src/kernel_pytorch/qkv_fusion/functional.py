"""The public functions of all groups."""

from .norm_rope.cache import qkv_norm_rope_cache_
from .norm_rope.functional import qk_layer_norm_rope, qk_norm_rope
from .projection.functional import qkv_norm_rope, qkv_projection
from .rotary.functional import rotary_embedding
from .rotary.in_place import rotary_embedding_

__all__ = [
    "qk_layer_norm_rope",
    "qk_norm_rope",
    "qkv_norm_rope",
    "qkv_norm_rope_cache_",
    "qkv_projection",
    "rotary_embedding",
    "rotary_embedding_",
]
