"""Every level against the float64 oracle, on awkward shapes and adversarial inputs."""

import pytest
import torch

from kernel_pytorch.harness.pytest_plugin import verification_trials
from kernel_pytorch.harness.technique import Level
from kernel_pytorch.harness.trials import RANDOM


def trial(parameter):
    """The parameter, marked slow where it takes seconds: compilation, Triton's interpreter."""
    _, implementation, tried = parameter.values
    slow = implementation.level in (Level.COMPILE, Level.TRITON) and tried.adversary != RANDOM
    slow |= implementation.level is Level.COMPILE and (tried.case.dtype != torch.float32 or not tried.case.core)
    slow |= implementation.level is Level.TRITON and tried.case.dtype != torch.float32
    return pytest.param(*parameter.values, id=parameter.id, marks=[pytest.mark.slow] if slow else [])


TRIALS = [trial(parameter) for parameter in verification_trials("fused-decode")]


@pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")
@pytest.mark.parametrize(("operation", "implementation", "trial"), TRIALS)
def test_level(verify_level, operation, implementation, trial):
    verify_level("fused-decode", operation, implementation, trial)
