"""What the operators of this package are, whichever level computes them.

This folder is linked into kernel_pytorch.cuda_ops as `_rmsnorm` and travels in its wheel: it imports torch and core.
"""
