"""PyTorch's own operators under TorchInductor: cuBLAS for the products, or a template of its own, the rest fused.

What a user would compile, not the definition: that multiplies in float32, which no tensor core does exactly. With
`fullgraph=True` a graph break is an error, never a fall back.
"""

import torch

from . import native

linear_act = torch.compile(native.linear_act, fullgraph=True)
gated_mlp = torch.compile(native.gated_mlp, fullgraph=True)
