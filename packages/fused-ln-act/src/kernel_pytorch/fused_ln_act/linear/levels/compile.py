"""PyTorch's operators under TorchInductor: cuBLAS or an Inductor template for the products, the rest fused.

A user would compile this, not the definition, which multiplies in float32: no tensor core does that exactly.
"""

from kernel_pytorch.fused_ln_act._core.compiled import compiled

from . import native

linear_act = compiled(native.linear_act)
gated_mlp = compiled(native.gated_mlp)
