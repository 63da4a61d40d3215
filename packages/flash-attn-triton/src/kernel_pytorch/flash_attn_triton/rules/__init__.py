"""What the operators of this package are, whichever level computes them.

This folder is linked into kernel_pytorch.cuda_ops as `_flash_attn_triton` and travels in its wheel: it imports torch
and core.
"""
