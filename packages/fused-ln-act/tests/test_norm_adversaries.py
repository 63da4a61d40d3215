"""Adversarial inputs of 16 bits, at the levels that are not PyTorch's own kernel (see `technique/norm.py`)."""

import pytest
import torch

from kernel_pytorch.fused_ln_act.technique import technique
from kernel_pytorch.harness.adversaries import ADVERSARIES
from kernel_pytorch.harness.checks import Skipped, check_trial
from kernel_pytorch.harness.technique import Case
from kernel_pytorch.harness.trials import Trial

pytestmark = [pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated"), pytest.mark.slow]


@pytest.mark.parametrize("adversary", ADVERSARIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["reference", "torchscript", "triton"])
@pytest.mark.parametrize("function", ["layer_norm", "add_layer_norm", "layer_norm_act", "add_rms_norm_act"])
def test_adversary(function, level, dtype, adversary, device):
    operation = technique.operation(function)
    case = Case("16 bits", dtype, {"shape": (61, 96), "activation": "gelu"})
    try:
        check_trial(technique, operation, operation.implementation(level), Trial(case, adversary), device)
    except Skipped as reason:
        pytest.skip(str(reason))
