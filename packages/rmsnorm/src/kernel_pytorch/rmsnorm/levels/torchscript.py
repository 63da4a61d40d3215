"""The definition under TorchScript: the historical rung (`torch.jit.script` is deprecated upstream)."""

from kernel_pytorch.rmsnorm._core.torchscript import scripted

from . import reference

rms_norm = scripted(reference.rms_norm)
add_rms_norm = scripted(reference.add_rms_norm)
head_rms_norm = scripted(reference.head_rms_norm)
