"""PyTorch's own operators under TorchInductor: cuBLAS for the products, or a template of its own, the rest fused.

What a user would compile, not the definition: that multiplies in float32, which no tensor core does exactly.
"""

from kernel_pytorch.fused_ln_act._core.compiled import compiled

from . import native

linear_act = compiled(native.linear_act)
gated_mlp = compiled(native.gated_mlp)
