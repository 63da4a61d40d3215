"""Levels that are exempt from an adversary fail it: a level that passes again loses its exemption."""

import pytest
import torch

from kernel_pytorch.fused_ln_act.technique import technique
from kernel_pytorch.harness.trials import trials
from kernel_pytorch.harness.verification import examine, expect

CPU = torch.device("cpu")
EXEMPT = [
    (operation, exemption, level)
    for operation in technique.operations
    for exemption in operation.exemptions
    if exemption.of_adversary and (exemption.devices is None or "cpu" in exemption.devices)
    for level in exemption.levels or ()
]


@pytest.mark.parametrize(
    ("operation", "exemption", "level"), EXEMPT, ids=[f"{operation.name}, {level}" for operation, _, level in EXEMPT]
)
def test_a_level_that_is_exempt_is_wrong_there(operation, exemption, level):
    """In one dtype at least: which of them PyTorch's kernels get wrong depends on the processor.

    Without AVX-512 they get none wrong at level native.
    """
    if level == "native" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("PyTorch's kernels for this processor are right")
    implementation, wrong = operation.implementation(level), []
    for trial in trials(operation, CPU):
        if exemption.covers(trial.adversary, trial.case.dtype, "cpu"):
            against = expect(operation, trial, CPU)
            for _ in range(3):  # TorchScript takes formulas of its own once it has interpreted a few calls
                error_checks = examine(implementation, against)
            wrong += [trial.label] if not all(j.passed for j in error_checks) else []
    assert wrong
