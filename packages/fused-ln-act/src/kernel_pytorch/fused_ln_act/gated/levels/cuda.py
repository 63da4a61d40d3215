"""CUDA C++ and its CPU backend: what kernel_pytorch.cuda_ops offers, where it is installed."""

from kernel_pytorch.fused_ln_act._core.cuda_level import function

swiglu = function("swiglu")
geglu = function("geglu")
reglu = function("reglu")
