"""The definition under TorchInductor: kernels made for the shapes it sees."""

from kernel_pytorch.fused_ln_act._core.compiled import compiled

from . import reference

layer_norm = compiled(reference.layer_norm)
add_layer_norm = compiled(reference.add_layer_norm)
layer_norm_act = compiled(reference.layer_norm_act)
add_layer_norm_act = compiled(reference.add_layer_norm_act)
rms_norm_act = compiled(reference.rms_norm_act)
add_rms_norm_act = compiled(reference.add_rms_norm_act)
