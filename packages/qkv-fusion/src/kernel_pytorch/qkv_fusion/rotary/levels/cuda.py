"""CUDA C++ and its CPU backend: what kernel_pytorch.cuda_ops offers, where it is installed."""

from kernel_pytorch.qkv_fusion._core.cuda_level import function

rotary_embedding = function("rotary_qk")
