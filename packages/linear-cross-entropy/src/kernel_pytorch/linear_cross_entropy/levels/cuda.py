"""CUDA C++ and its CPU twin: what kernel_pytorch.cuda_ops offers, where it is installed."""

from kernel_pytorch.linear_cross_entropy._core.cuda_level import function

cross_entropy = function("cross_entropy")
