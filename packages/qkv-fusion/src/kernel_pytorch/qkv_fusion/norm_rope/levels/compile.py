"""The definition under TorchInductor: kernels made for the shapes it sees."""

from kernel_pytorch.qkv_fusion._core.compiled import compiled

from . import reference

qk_norm_rope = compiled(reference.qk_norm_rope)
qk_layer_norm_rope = compiled(reference.qk_layer_norm_rope)
