"""The definition under TorchScript: the historical rung (`torch.jit.script` is deprecated upstream)."""

from kernel_pytorch.fused_ln_act._core.torchscript import scripted

from . import reference

layer_norm = scripted(reference.layer_norm)
add_layer_norm = scripted(reference.add_layer_norm)
layer_norm_act = scripted(reference.layer_norm_act)
add_layer_norm_act = scripted(reference.add_layer_norm_act)
rms_norm_act = scripted(reference.rms_norm_act)
add_rms_norm_act = scripted(reference.add_rms_norm_act)
