"""The definition under TorchInductor: kernels made for the shapes it sees."""

from kernel_pytorch.qkv_fusion._core.compiled import compiled

from . import reference

rotary_embedding = compiled(reference.rotary_embedding)
