"""The definition under TorchScript: the historical rung (`torch.jit.script` is deprecated upstream)."""

from kernel_pytorch.linear_cross_entropy._core.torchscript import scripted

from . import reference

linear_cross_entropy = scripted(reference.linear_cross_entropy)
cross_entropy = scripted(reference.cross_entropy)
