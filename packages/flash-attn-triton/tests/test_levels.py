"""Every level against the float64 oracle, on awkward shapes and adversarial inputs."""

import pytest
import torch

from kernel_pytorch.harness.pytest_plugin import verification_trials
from kernel_pytorch.harness.technique import Level
from kernel_pytorch.harness.trials import IMITATED, RANDOM


def trial(parameter):
    """The parameter, marked slow where it takes seconds: compilation, long sequences, Triton's interpreter."""
    _, implementation, tried = parameter.values
    quick = implementation.level in (Level.REFERENCE, Level.NATIVE, Level.CUDA)
    slow = tried.adversary == IMITATED or (tried.adversary != RANDOM and not quick)
    if implementation.level in (Level.COMPILE, Level.TORCHSCRIPT, Level.TRITON):
        slow |= tried.case.dtype != torch.float32
    slow |= implementation.level is Level.COMPILE and not tried.case.core
    return pytest.param(*parameter.values, id=parameter.id, marks=[pytest.mark.slow] if slow else [])


TRIALS = [trial(parameter) for parameter in verification_trials("flash-attn-triton")]


@pytest.mark.parametrize(("operation", "implementation", "trial"), TRIALS)
def test_level(verify_level, operation, implementation, trial):
    verify_level("flash-attn-triton", operation, implementation, trial)
