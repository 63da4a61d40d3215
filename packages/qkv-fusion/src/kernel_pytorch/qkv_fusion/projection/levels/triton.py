"""One product of cuBLAS, then one kernel of Triton for norm and rotation; v stays a view of the product."""

from kernel_pytorch.qkv_fusion._core.operation import calls, first_two
from kernel_pytorch.qkv_fusion.norm_rope import operators
from kernel_pytorch.qkv_fusion.projection.project import projected

qkv_norm_rope = projected(calls(operators.qk_norm_rope, first_two)(operators.arguments_of))
