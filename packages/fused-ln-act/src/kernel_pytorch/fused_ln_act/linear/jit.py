"""The definition under TorchScript: the historical rung (`torch.jit.script` is deprecated upstream)."""

import torch

from . import reference

linear_act = torch.jit.script(reference.linear_act)
gated_mlp = torch.jit.script(reference.gated_mlp)
