"""The definition under TorchScript: the historical rung (`torch.jit.script` is deprecated upstream)."""

from . import reference
from .torchscript import scripted

linear_cross_entropy = scripted(reference.linear_cross_entropy)
cross_entropy = scripted(reference.cross_entropy)
