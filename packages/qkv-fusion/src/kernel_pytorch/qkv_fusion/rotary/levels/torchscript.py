"""The definition under TorchScript: the historical rung (`torch.jit.script` is deprecated upstream)."""

from kernel_pytorch.qkv_fusion._core.torchscript import scripted

from . import reference

rotary_embedding = scripted(reference.rotary_embedding)
