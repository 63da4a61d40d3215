"""Triton: one kernel for queries and keys. First derivatives are kernels too, second ones PyTorch's."""

from kernel_pytorch.qkv_fusion._core.operation import calls, first_two
from kernel_pytorch.qkv_fusion.norm_rope import operators

qk_norm_rope = calls(operators.qk_norm_rope, first_two)(operators.arguments_of)
qk_layer_norm_rope = calls(operators.qk_layer_norm_rope, first_two)(operators.arguments_of)
