"""Triton: one kernel for both functions. First derivatives are kernels too, second ones PyTorch's.

`bias_act` is the operator of that name.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.fused_ln_act._core.operation import calls
from kernel_pytorch.fused_ln_act.bias import operators


@calls(operators.bias_dropout_add)
def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor | None
) -> tuple[Any, ...]:
    """`bias_dropout_add` of `reference.py`."""
    return x, bias, residual, seed, p
