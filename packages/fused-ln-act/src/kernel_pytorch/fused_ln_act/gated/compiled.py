"""The definition under TorchInductor: kernels made for the shapes it sees.

With `fullgraph=True` a graph break is an error, never a fall back.
"""

import torch

from . import reference

swiglu = torch.compile(reference.swiglu, fullgraph=True)
geglu = torch.compile(reference.geglu, fullgraph=True)
reglu = torch.compile(reference.reglu, fullgraph=True)
