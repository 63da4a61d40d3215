"""Rows of the support table about what the numbers are: second derivatives, and whether bits stay the same."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.harness.checks import check_deterministic, check_rows_independent, check_second_derivatives
from kernel_pytorch.harness.support.subject import Subject

GPU_ROWS = 64
"""How many times as many rows a GPU gets: few rows give its atomic additions too little to do to change their order."""


def check_double_backward(subject: Subject) -> None:
    """`gradcheck` and `gradgradcheck` in float64, along random directions."""
    check_second_derivatives(*subject.bound(subject.arguments()), fast=True)


def check_determinism(subject: Subject) -> None:
    """The same call gives the same bits again, outputs and gradients."""
    function, arguments = subject.bound(subject.arguments(GPU_ROWS if subject.device.type == "cuda" else 1))
    check_deterministic(function, arguments, backward=subject.operation.differentiable)


def check_batch_invariance(subject: Subject) -> None:
    """A row alone, or in a smaller batch, has the bits that it has in the whole batch; so has its gradient."""
    data = [subject.has_rows(name) for name in subject.names]
    arguments = [
        a.detach().requires_grad_(a.is_floating_point() and subject.operation.differentiable)
        if isinstance(a, Tensor) and has_rows
        else a
        for has_rows, a in zip(data, subject.arguments(), strict=True)
    ]
    torch._dynamo.reset()
    check_rows_independent(subject.function, arguments, data=data)
