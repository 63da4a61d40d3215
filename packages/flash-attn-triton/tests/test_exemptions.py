"""Attention is exempt from those adversarial inputs that no level gets right, and from no others."""

import dataclasses

import pytest
import torch

from kernel_pytorch.flash_attn_triton.technique import INPUTS, technique
from kernel_pytorch.harness.trials import trials
from kernel_pytorch.harness.verification import examine, expect


def wrong(level, exemption, others):
    """The adversaries of an exemption that a level fails where they are planted; `others` stay exempt."""
    operation = dataclasses.replace(technique.operation("flash_attention"), exemptions=others)
    cpu, implementation = torch.device("cpu"), operation.implementation(level)
    asked = [t for t in trials(operation, cpu) if exemption.covers(t.adversary, t.case.dtype, "cpu")]
    assert asked
    return {t.adversary for t in asked if not all(j.passed for j in examine(implementation, expect(operation, t, cpu)))}


@pytest.mark.parametrize(
    "exemption", [each for each in INPUTS if each.devices is None], ids=lambda each: str(each).partition(":")[0]
)
def test_attention_is_exempt_from_no_more_than_it_must_be(exemption):
    """PyTorch's own is wrong about each, in one dtype at least; the operator is right where scores are small."""
    others = tuple(each for each in INPUTS if each is not exemption)
    assert wrong("native", exemption, others) == set(exemption.what)
    if exemption.arguments == ("v",):
        assert wrong("cuda", exemption, others) == set()
