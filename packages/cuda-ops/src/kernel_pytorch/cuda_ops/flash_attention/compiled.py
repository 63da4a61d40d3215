"""The definition under TorchInductor: kernels made for the shapes it sees."""

import torch

from . import reference

flash_attention = torch.compile(reference.flash_attention, fullgraph=True)
