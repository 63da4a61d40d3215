"""The definition under TorchScript: the historical rung (`torch.jit.script` is deprecated upstream)."""

import torch

from . import reference

swiglu = torch.jit.script(reference.swiglu)
geglu = torch.jit.script(reference.geglu)
reglu = torch.jit.script(reference.reglu)
