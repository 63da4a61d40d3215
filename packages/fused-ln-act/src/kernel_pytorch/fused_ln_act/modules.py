"""The modules of all groups."""

from .gated.module import GEGLU, SwiGLU
from .linear.module import MLP, GatedMLP, LinearAct
from .norm.module import AddLayerNorm, LayerNorm, LayerNormAct

__all__ = ["GEGLU", "MLP", "AddLayerNorm", "GatedMLP", "LayerNorm", "LayerNormAct", "LinearAct", "SwiGLU"]
