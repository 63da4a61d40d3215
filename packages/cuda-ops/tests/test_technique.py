"""Every level against the float64 oracle, on awkward shapes; every instruction set of the twin."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from kernel_pytorch.cuda_ops import LIBRARY, levels
from kernel_pytorch.cuda_ops.technique import attention, kernels, rungs, technique
from kernel_pytorch.harness.pytest_plugin import verification_trials
from kernel_pytorch.harness.technique import Level
from kernel_pytorch.harness.trials import IMITATED, RANDOM, REAL, trials
from kernel_pytorch.harness.verification import examine, standard


def trial(parameter):
    """The parameter, marked: what compiles for every layout takes long, and is PyTorch's; much takes long emulated.

    The packages that operations belong to verify their level "cuda" in tests of their own.
    """
    operation, implementation, tried = parameter.values
    slow = implementation.level is Level.COMPILE and tried.adversary != RANDOM
    emulated = "KERNEL_PYTORCH_LIBRARY" in os.environ
    shared = operation in rungs.operations
    slow |= shared and (emulated or not implementation.partial or tried.adversary != RANDOM)
    slow |= emulated and tried.adversary in (IMITATED, REAL)
    return pytest.param(*parameter.values, id=parameter.id, marks=[pytest.mark.slow] if slow else [])


TRIALS = [trial(parameter) for parameter in verification_trials("cuda-ops")]


@pytest.mark.parametrize(("operation", "implementation", "trial"), TRIALS)
def test_level(verify_level, operation, implementation, trial):
    verify_level("cuda-ops", operation, implementation, trial)


# What a lower instruction set could do wrongly: vectors of other lengths, tails of rows, conversions.
VERIFY = """
    import dataclasses
    import torch
    from kernel_pytorch.cuda_ops.technique import attention, technique
    from kernel_pytorch.harness.verification import verify
    alone = dataclasses.replace(technique, operations=attention.operations)
    found = list(verify(alone, torch.device("cpu"), levels=["cuda"]))
    assert len(found) > 30, len(found)
    assert not any(v.unavailable for v in found)
    assert not [line for v in found for line in v.failures()]
"""


@pytest.mark.parametrize("instruction_set", [name for name in ("base", "avx2") if name in LIBRARY.instruction_sets])
def test_lower_instruction_sets(instruction_set):
    environment = {**os.environ, "KERNEL_PYTORCH_CPU_ISA": instruction_set}
    subprocess.run([sys.executable, "-c", textwrap.dedent(VERIFY)], check=True, timeout=300, env=environment)


def wrong(level, spared, others):
    """The adversaries of `spared` about which a level is wrong where they are planted; `others` stay spared."""
    operation = dataclasses.replace(technique.operation("flash_attention"), spared=others)
    cpu, implementation = torch.device("cpu"), operation.implementation(level)
    asked = [t for t in trials(operation, cpu) if spared.covers(t.adversary, t.case.dtype, "cpu")]
    assert asked
    return {
        t.adversary for t in asked if not all(j.passed for j in examine(implementation, standard(operation, t, cpu)))
    }


@pytest.mark.parametrize(
    "spared", [s for s in attention.SPARED if s.devices is None], ids=lambda spared: ", ".join(spared.arguments)
)
def test_attention_is_spared_no_more_than_it_must_be(spared):
    """PyTorch's own is wrong about each, in one dtype at least; the operator is right where scores are small."""
    others = tuple(each for each in attention.SPARED if each is not spared)
    assert wrong("native", spared, others) == set(spared.adversaries)
    if spared.arguments == ("v",):
        assert wrong("cuda", spared, others) == set()


def test_default_is_the_compiled_operator_where_it_runs():
    cpu = torch.device("cpu")
    assert levels.default("rotary_embedding", cpu, torch.bfloat16) == "cuda"
    assert levels.default("rotary_embedding", torch.device("meta"), torch.bfloat16) == "native"
    assert "compiled are CUDA and CPU code" in levels.unavailable("cuda", torch.device("meta"), torch.bfloat16)
    assert levels.default("flash_attention", cpu, torch.bfloat16) == "native"
    of_levels = {i.name for o in technique.operations for i in o.implementations if not i.partial}
    assert of_levels == set(levels.LEVELS)


def test_every_operator_with_cuda_kernels_is_a_unit(monkeypatch, tmp_path):
    units = kernels.cuda_units()
    if not kernels.CSRC.is_dir():
        pytest.skip("not a checkout")
    assert {unit.source.parent.name for unit in units} >= {"rms_norm", "rotary_embedding", "qk_norm_rope"}
    assert all(unit.source.is_file() and unit.include[0].is_dir() for unit in units)
    monkeypatch.setattr(kernels, "CSRC", tmp_path / "absent")
    assert kernels.cuda_units() == []
