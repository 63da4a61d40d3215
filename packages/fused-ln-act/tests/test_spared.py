"""Levels that are spared an adversary are wrong about it: one that is right again must be asked again."""

import pytest
import torch

from kernel_pytorch.fused_ln_act.technique import technique
from kernel_pytorch.harness.trials import trials
from kernel_pytorch.harness.verification import examine, standard

CPU = torch.device("cpu")
SPARED = [
    (operation, spared, level)
    for operation in technique.operations
    for spared in operation.spared
    for level in spared.levels or ()
    if spared.devices is None or "cpu" in spared.devices
]


@pytest.mark.parametrize(
    ("operation", "spared", "level"), SPARED, ids=[f"{operation.name}, {level}" for operation, _, level in SPARED]
)
def test_a_level_that_is_spared_is_wrong_there(operation, spared, level):
    """In one dtype at least: which of them PyTorch's kernels get wrong goes by the processor."""
    implementation, wrong = operation.implementation(level), []
    for trial in trials(operation, CPU):
        if spared.covers(trial.adversary, trial.case.dtype, "cpu"):
            against = standard(operation, trial, CPU)
            for _ in range(3):  # TorchScript takes formulas of its own once it has interpreted a few calls
                judgements = examine(implementation, against)
            wrong += [trial.label] if not all(j.passed for j in judgements) else []
    assert wrong
