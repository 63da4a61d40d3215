"""Every level against the float64 oracle, on awkward shapes and adversarial inputs."""

import pytest

from kernel_pytorch.harness.pytest_plugin import verification_trials

# Of Triton's interpreter, where a product of outliers is infinite in float16, as it should be.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")]


@pytest.mark.parametrize(("operation", "implementation", "trial"), verification_trials("fused-ln-act"))
def test_level(verify_level, operation, implementation, trial):
    verify_level("fused-ln-act", operation, implementation, trial)
