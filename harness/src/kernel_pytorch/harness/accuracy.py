"""How far every implementation is from the truth on the activations of a real network."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from kernel_pytorch.harness.availability import why_unavailable
from kernel_pytorch.harness.real_input import TOKENS, RealInputUnavailable, real_activations
from kernel_pytorch.harness.results import Accuracy
from kernel_pytorch.harness.technique import Implementation, Operation, Technique
from kernel_pytorch.harness.trials import REAL, Trial, of_activations
from kernel_pytorch.harness.verification import Standard, examine, not_offered, standard

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def measure_accuracy(
    technique: Technique,
    device: torch.device,
    wanted: set[str] | None = None,
    operations: Collection[str] | None = None,
) -> tuple[tuple[Accuracy, ...], str]:
    """Errors of implementations on real activations, and a sentence saying what those are or why none are.

    Args:
        technique: what to measure.
        device: where.
        wanted: names of the implementations, or None for all.
        operations: names of the operations, or None for all.
    """
    chosen = [o for o in technique.operations if operations is None or o.name in operations]
    real = [o for o in chosen if o.real_input is not None]
    if not real:
        return (), "not measured here: real activations mean nothing to this technique"
    try:
        activations = real_activations(tokens=TOKENS)
    except RealInputUnavailable as error:
        return (), f"not measured here: {error}"
    found: list[Accuracy] = []
    for operation in real:
        for dtype in DTYPES:
            against = standard(operation, Trial(of_activations(dtype), REAL), device)
            for implementation in operation.implementations:
                if wanted is None or implementation.name in wanted:
                    found += _accuracy(technique, operation, implementation, dtype, against, device)
    tokens, channels = activations.shape
    what = f"{tokens} x {channels} hidden states of all-MiniLM-L6-v2 reading the docstrings of Python's library"
    return tuple(found), what


def _accuracy(
    technique: Technique,
    operation: Operation,
    implementation: Implementation,
    dtype: torch.dtype,
    against: Standard,
    device: torch.device,
) -> Iterator[Accuracy]:
    about: dict[str, Any] = {
        "operation": operation.name,
        "implementation": implementation.name,
        "dtype": str(dtype).removeprefix("torch."),
    }
    reason = why_unavailable(technique, implementation, device, dtype)
    if reason is not None:
        yield Accuracy(**about, reason=reason)
        return
    judgements = examine(implementation, against)
    if reason := not_offered(implementation, judgements):
        yield Accuracy(**about, reason=reason)
        return
    for j in judgements:
        about |= {"quantity": j.quantity, "reason": j.message}
        if j.error_over_budget == float("inf"):  # NaN, the wrong shape, an exception: there is no error to give
            yield Accuracy(**about)
        else:
            yield Accuracy(
                **about,
                relative_error=j.relative_error,
                reference_error=j.reference_error,
                error_over_budget=j.error_over_budget,
            )
