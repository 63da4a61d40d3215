"""Results that do not come from a definition: what it computes is held against them."""

from __future__ import annotations

from typing import Any

import torch

from kernel_pytorch.harness.oracle import ErrorCheck, failed
from kernel_pytorch.harness.technique import Operation
from kernel_pytorch.harness.tensors import as_tuple


def judge_known(operation: Operation, device: torch.device) -> tuple[ErrorCheck, ...]:
    """Compute each call of `Operation.known` by the definition; one check for each that has another result.

    The relative tolerance is 1e-12: far above the rounding of float64, far below a wrong formula.
    """

    def tensor(given: Any) -> Any:
        given = torch.tensor(given, dtype=torch.float64) if isinstance(given, list) else given
        return given.to(device) if isinstance(given, torch.Tensor) else given

    found = []
    for number, (args, kwargs, result) in enumerate(operation.known, 1):
        try:
            computed = operation.reference.definition()(*map(tensor, operation.bound((args, dict(kwargs)), "known")))
            results = result if isinstance(result, tuple) else (result,)
            for ours, known in zip(as_tuple(computed), map(tensor, results), strict=True):
                torch.testing.assert_close(ours, known, rtol=1e-12, atol=0.0)
        except Exception as error:  # a definition may raise anything
            found.append(failed(f"known result {number}", " ".join(str(error).split())))
    return tuple(found)
