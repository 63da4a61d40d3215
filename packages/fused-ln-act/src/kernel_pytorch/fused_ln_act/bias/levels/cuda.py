"""CUDA C++ and its CPU backend: what kernel_pytorch.cuda_ops offers, where it is installed."""

from kernel_pytorch.fused_ln_act._core.cuda_level import function

bias_act = function("bias_act")
bias_dropout_add = function("bias_dropout_add")
