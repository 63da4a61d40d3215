"""CUDA C++ and its CPU backend: what kernel_pytorch.cuda_ops offers, where it is installed."""

from kernel_pytorch.fused_ln_act._core.cuda_level import function

layer_norm = function("layer_norm")
add_layer_norm = function("add_layer_norm")
layer_norm_act = function("layer_norm_act")
add_layer_norm_act = function("add_layer_norm_act")
rms_norm_act = function("rms_norm_act")
add_rms_norm_act = function("add_rms_norm_act")
