"""What the operators of this package are, whichever level computes them; the activations and the mask of dropout.

This folder is linked into kernel_pytorch.cuda_ops as `_fused_ln_act` and travels in its wheel: it imports torch and
core.
"""
