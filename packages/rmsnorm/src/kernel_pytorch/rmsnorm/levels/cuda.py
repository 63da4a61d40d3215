"""CUDA C++ and its CPU twin: what kernel_pytorch.cuda_ops offers, where it is installed."""

from kernel_pytorch.rmsnorm._core.cuda_level import function

rms_norm = function("rms_norm")
add_rms_norm = function("add_rms_norm")
head_rms_norm = function("head_rms_norm")
