"""CUDA C++ and its CPU backend: what kernel_pytorch.cuda_ops offers, where it is installed."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.qkv_fusion._core.cuda_level import function
from kernel_pytorch.qkv_fusion.norm_rope.operators import arguments_of

launch = function("qk_norm_rope")


def qk_norm_rope(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`qk_norm_rope` of `reference.py`; same arguments and result dtypes."""
    return launch(*arguments_of(*arguments))
