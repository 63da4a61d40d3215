"""The definition under TorchInductor: kernels made for the shapes it sees."""

from kernel_pytorch.flash_attn_triton._core.compiled import compiled

from . import reference

flash_attention = compiled(reference.flash_attention)
flash_attention_masked = compiled(reference.flash_attention_masked)
flash_attention_with_lse = compiled(reference.flash_attention_with_lse)
flash_attention_varlen = compiled(reference.flash_attention_varlen)
flash_decode = compiled(reference.flash_decode)
