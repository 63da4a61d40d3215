"""The definition under TorchInductor: kernels made for the shapes it sees.

With `fullgraph=True` a graph break is an error, never a fall back.
"""

import torch

from . import reference

layer_norm = torch.compile(reference.layer_norm, fullgraph=True)
add_layer_norm = torch.compile(reference.add_layer_norm, fullgraph=True)
layer_norm_act = torch.compile(reference.layer_norm_act, fullgraph=True)
add_layer_norm_act = torch.compile(reference.add_layer_norm_act, fullgraph=True)
rms_norm_act = torch.compile(reference.rms_norm_act, fullgraph=True)
add_rms_norm_act = torch.compile(reference.add_rms_norm_act, fullgraph=True)
