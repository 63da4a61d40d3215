"""One product of cuBLAS, then one kernel of CUDA C++ for norm and rotation; v stays a view of the product."""

from kernel_pytorch.qkv_fusion.norm_rope.levels.cuda import qk_norm_rope
from kernel_pytorch.qkv_fusion.projection.project import projected

qkv_norm_rope = projected(qk_norm_rope)
