"""Every level against the float64 oracle, on awkward shapes and adversarial inputs."""

import pytest
import torch

from kernel_pytorch.harness.pytest_plugin import verification_trials
from kernel_pytorch.harness.technique import Level
from kernel_pytorch.harness.trials import RANDOM

# Of Triton's interpreter, where a product of outliers is infinite in float16, as it should be.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")


def is_quick(implementation, tried):
    """Every case of ours in float32, and what stands for the rest; what compiles anew for every shape is not."""
    if implementation.level is Level.COMPILE or "many" in tried.case.name:
        return False
    ours = implementation.level in (Level.NATIVE, Level.TRITON, Level.CUDA) and tried.case.dtype == torch.float32
    return tried.adversary == RANDOM and (ours or tried.case.core)


def trial(parameter):
    """The parameter, marked."""
    _, implementation, tried = parameter.values
    marks = [] if is_quick(implementation, tried) else [pytest.mark.slow]
    return pytest.param(*parameter.values, id=parameter.id, marks=marks)


TRIALS = [trial(parameter) for parameter in verification_trials("linear-cross-entropy")]


@pytest.mark.parametrize(("operation", "implementation", "trial"), TRIALS)
def test_level(verify_level, operation, implementation, trial):
    verify_level("linear-cross-entropy", operation, implementation, trial)
