"""Every level against the float64 oracle, on awkward shapes and adversarial inputs."""

import pytest

from kernel_pytorch.harness.pytest_plugin import verification_trials


@pytest.mark.parametrize(("operation", "implementation", "trial"), verification_trials("qkv-fusion"))
def test_level(verify_level, operation, implementation, trial):
    verify_level("qkv-fusion", operation, implementation, trial)
