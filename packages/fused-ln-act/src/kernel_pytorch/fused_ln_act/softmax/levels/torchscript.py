"""The definition under TorchScript: the historical rung (`torch.jit.script` is deprecated upstream)."""

from kernel_pytorch.fused_ln_act._core.torchscript import scripted

from . import reference

softmax = scripted(reference.softmax)
