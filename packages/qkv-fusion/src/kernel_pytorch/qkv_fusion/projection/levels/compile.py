"""The definition under TorchInductor: kernels made for the shapes it sees."""

from kernel_pytorch.qkv_fusion._core.compiled import compiled

from . import reference

qkv_projection = compiled(reference.qkv_projection)
qkv_norm_rope = compiled(reference.qkv_norm_rope)
