"""The definition computed one head of k and v after the other, which long sequences are verified with."""

import dataclasses

import pytest
import torch

from kernel_pytorch.flash_attn_triton.technique import technique
from kernel_pytorch.harness.trials import trials
from kernel_pytorch.harness.verification import expect

CPU = torch.device("cpu")
OPERATIONS = [operation for operation in technique.operations if operation.in_parts is not None]
TRIALS = [(o, t) for o in OPERATIONS for t in trials(o, CPU) if t.case.dtype is torch.float32]


def test_what_grows_with_the_square_of_the_length_has_it():
    assert {o.name for o in OPERATIONS} >= {"flash_attention", "flash_attention_with_lse", "flash_attention_varlen"}


@pytest.mark.parametrize(("operation", "trial"), TRIALS, ids=lambda found: getattr(found, "label", None) or found.name)
def test_it_computes_what_the_definition_does(operation, trial, monkeypatch):
    """Outputs and gradients, with every feature of the test cases; dropout, whose mask knows the head, whole."""
    whole, reference, parts = expect(operation, trial, CPU), operation.reference, operation.in_parts

    def too_large(*values):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(reference), "definition", lambda self: too_large)
    grouped = expect(dataclasses.replace(operation, in_parts=parts), trial, CPU)
    torch.testing.assert_close(
        grouped.truth.quantities(), whole.truth.quantities(), rtol=1e-12, atol=1e-12, equal_nan=True
    )
