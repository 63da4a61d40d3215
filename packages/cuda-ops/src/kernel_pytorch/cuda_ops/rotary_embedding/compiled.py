"""The definition under TorchInductor: kernels made for the shapes it sees."""

import torch

from . import reference

rotary_embedding = torch.compile(reference.rotary_embedding, fullgraph=True)
