"""The definition under TorchScript: the historical rung (`torch.jit.script` is deprecated upstream)."""

from kernel_pytorch.fused_ln_act._core.torchscript import scripted

from . import reference

bias_act = scripted(reference.bias_act)
bias_dropout_add = scripted(reference.bias_dropout_add)
