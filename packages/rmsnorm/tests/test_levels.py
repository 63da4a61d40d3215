"""Every level against the float64 oracle, on awkward shapes and adversarial inputs."""

import pytest
import torch

from kernel_pytorch.harness.pytest_plugin import verification_trials
from kernel_pytorch.harness.technique import Level


def trial(parameter):
    """The parameter, marked slow: half a minute in Triton's interpreter, and layouts that are compiled in float32."""
    _, implementation, tried = parameter.values
    slow = implementation.level is Level.TRITON and tried.case.name == "very long rows"
    slow |= implementation.level is Level.COMPILE and tried.case.dtype != torch.float32 and "view" in tried.adversary
    return pytest.param(*parameter.values, id=parameter.id, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("operation", "implementation", "trial"), [trial(parameter) for parameter in verification_trials("rmsnorm")]
)
def test_level(verify_level, operation, implementation, trial):
    verify_level("rmsnorm", operation, implementation, trial)
