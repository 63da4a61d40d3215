"""Every numbered kernel against the float64 oracle, on awkward shapes; every instruction set of the CPU backend."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from kernel_pytorch.cuda_ops import LIBRARY, levels
from kernel_pytorch.cuda_ops.technique import technique
from kernel_pytorch.harness.pytest_plugin import verification_trials
from kernel_pytorch.harness.trials import RANDOM


def trial(parameter):
    """The parameter, marked: the packages that operations belong to verify level "cuda" in tests of their own."""
    _, implementation, tried = parameter.values
    emulated = "KERNEL_PYTORCH_LIBRARY" in os.environ
    slow = emulated or not implementation.partial or tried.adversary != RANDOM
    return pytest.param(*parameter.values, id=parameter.id, marks=[pytest.mark.slow] if slow else [])


TRIALS = [trial(parameter) for parameter in verification_trials("cuda-ops")]


@pytest.mark.parametrize(("operation", "implementation", "trial"), TRIALS)
def test_every_rung(verify_level, operation, implementation, trial):
    verify_level("cuda-ops", operation, implementation, trial)


# What a lower instruction set could do wrongly: vectors of other lengths, tails of rows, conversions.
VERIFY = """
    import torch
    from kernel_pytorch.cuda_ops.technique import technique
    from kernel_pytorch.harness.verification import verify
    found = list(verify(technique, torch.device("cpu"), levels=["cuda"]))
    assert len(found) > 30, len(found)
    assert not any(v.unavailable for v in found)
    assert not [line for v in found for line in v.failures()]
"""


@pytest.mark.slow
@pytest.mark.parametrize("instruction_set", [name for name in ("base", "avx2") if name in LIBRARY.instruction_sets])
def test_lower_instruction_sets(instruction_set):
    environment = {**os.environ, "KERNEL_PYTORCH_CPU_ISA": instruction_set}
    subprocess.run([sys.executable, "-c", textwrap.dedent(VERIFY)], check=True, timeout=300, env=environment)


def test_a_program_that_fails_in_a_process_that_others_share_is_found(run_on):
    with pytest.raises(AssertionError, match="ValueError: planted"):
        run_on("base", "raise ValueError('planted')")
    with pytest.raises(pytest.fail.Exception, match="ended with -6"):
        run_on("base", "import os; os.abort()")
    assert run_on("base", "print(42)") == "42\n"


def test_default_is_the_compiled_operator_where_it_runs():
    cpu = torch.device("cpu")
    assert levels.default("rotary_embedding", cpu, torch.bfloat16) == "cuda"
    assert levels.default("rotary_embedding", torch.device("meta"), torch.bfloat16) == "native"
    assert "compiled are CUDA and CPU code" in levels.unavailable("cuda", torch.device("meta"), torch.bfloat16)
    of_levels = {i.name for o in technique.operations for i in o.implementations if not i.partial}
    assert of_levels == set(levels.LEVELS)
