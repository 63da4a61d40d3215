"""The definition under TorchScript: the historical rung (`torch.jit.script` is deprecated upstream)."""

from kernel_pytorch.flash_attn_triton._core.torchscript import scripted

from . import reference

flash_attention = scripted(reference.flash_attention)
flash_attention_masked = scripted(reference.flash_attention_masked)
flash_attention_with_lse = scripted(reference.flash_attention_with_lse)
flash_attention_varlen = scripted(reference.flash_attention_varlen)
flash_decode = scripted(reference.flash_decode)
