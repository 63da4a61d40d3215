"""Every level against the float64 oracle, on awkward shapes and adversarial inputs."""

import pytest
import torch

from kernel_pytorch.harness.pytest_plugin import verification_trials
from kernel_pytorch.harness.technique import Level


def trial(parameter):
    """The parameter, marked slow where TorchInductor compiles anew for a layout, and does so in float32 already."""
    _, implementation, tried = parameter.values
    slow = implementation.level is Level.COMPILE and tried.case.dtype != torch.float32 and "view" in tried.adversary
    return pytest.param(*parameter.values, id=parameter.id, marks=[pytest.mark.slow] if slow else [])


TRIALS = [trial(parameter) for parameter in verification_trials("qkv-fusion")]


@pytest.mark.parametrize(("operation", "implementation", "trial"), TRIALS)
def test_level(verify_level, operation, implementation, trial):
    verify_level("qkv-fusion", operation, implementation, trial)
