"""The definition under TorchInductor: kernels made for the shapes it sees."""

import torch

from . import reference

qk_norm_rope = torch.compile(reference.qk_norm_rope, fullgraph=True)
