"""Adversarial inputs that attention is spared are those that no level gets right, and no others."""

import dataclasses

import pytest
import torch

from kernel_pytorch.flash_attn_triton.technique import SPARED, technique
from kernel_pytorch.harness.trials import trials
from kernel_pytorch.harness.verification import examine, standard


def wrong(level, spared, others):
    """The adversaries of `spared` about which a level is wrong where they are planted; `others` stay spared."""
    operation = dataclasses.replace(technique.operation("flash_attention"), spared=others)
    cpu, implementation = torch.device("cpu"), operation.implementation(level)
    asked = [t for t in trials(operation, cpu) if spared.covers(t.adversary, t.case.dtype, "cpu")]
    assert asked
    return {
        t.adversary for t in asked if not all(j.passed for j in examine(implementation, standard(operation, t, cpu)))
    }


@pytest.mark.parametrize(
    "spared", [s for s in SPARED if s.devices is None], ids=lambda spared: ", ".join(spared.arguments)
)
def test_attention_is_spared_no_more_than_it_must_be(spared):
    """PyTorch's own is wrong about each, in one dtype at least; the operator is right where scores are small."""
    others = tuple(each for each in SPARED if each is not spared)
    assert wrong("native", spared, others) == set(spared.adversaries)
    if spared.arguments == ("v",):
        assert wrong("cuda", spared, others) == set()
