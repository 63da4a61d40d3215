"""The definition under TorchScript: the historical rung (`torch.jit.script` is deprecated upstream)."""

from . import reference
from .torchscript import scripted

my_technique = scripted(reference.my_technique)
