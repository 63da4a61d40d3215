"""The definition under TorchScript: the historical rung (`torch.jit.script` is deprecated upstream)."""

import torch

from . import reference

bias_act = torch.jit.script(reference.bias_act)
bias_dropout_add = torch.jit.script(reference.bias_dropout_add)
