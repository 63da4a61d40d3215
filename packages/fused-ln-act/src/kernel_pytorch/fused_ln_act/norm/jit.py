"""The definition under TorchScript: the historical rung (`torch.jit.script` is deprecated upstream)."""

import torch

from . import reference

layer_norm = torch.jit.script(reference.layer_norm)
add_layer_norm = torch.jit.script(reference.add_layer_norm)
layer_norm_act = torch.jit.script(reference.layer_norm_act)
add_layer_norm_act = torch.jit.script(reference.add_layer_norm_act)
rms_norm_act = torch.jit.script(reference.rms_norm_act)
add_rms_norm_act = torch.jit.script(reference.add_rms_norm_act)
