"""The benchmark of numbered kernels: it finds them, times them beside a copy, and says which refused."""

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernel_pytorch.cuda_ops import LIBRARY
from kernel_pytorch.cuda_ops.operators import operators
from kernel_pytorch.cuda_ops.rungs import rung
from kernel_pytorch.cuda_ops.technique.rungs import LONGEST_IN_ORDER, Rung, operations

FILE = Path(__file__).parents[1] / "benchmarks" / "rungs.py"


def chosen():
    number = operators.choose_rung(0)
    operators.choose_rung(number)
    return number


@pytest.fixture(scope="module")
def rungs():
    pytest.importorskip("rich")
    specification = importlib.util.spec_from_file_location("cuda_ops_rungs", FILE)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # where dataclasses look for it
    specification.loader.exec_module(module)
    return module


def test_a_rung_lasts_as_long_as_its_block_and_belongs_to_a_thread():
    with pytest.raises(KeyError), rung(2):
        with rung(3):
            assert chosen() == 3
            with ThreadPoolExecutor(1) as other:
                assert other.submit(chosen).result() == 0
        assert chosen() == 2
        raise KeyError
    assert chosen() == 0


def calls(device):
    """A call of each operator that has rungs."""
    x, vector, target = torch.randn(4, 64, device=device), torch.ones(64, device=device), torch.arange(4, device=device)
    heads, angles = torch.randn(1, 4, 2, 64, device=device), torch.randn(4, 32, device=device)
    return {
        "bias_act": lambda: operators.bias_act(x, vector, "silu"),
        "bias_dropout_add": lambda: operators.bias_dropout_add(x, vector, x, None, 0.0),
        "cross_entropy": lambda: operators.cross_entropy(x, target, -100, 0.0, 0.0, 0.0),
        "flash_attention": lambda: operators.flash_attention(heads, heads, heads, 1.0, False),
        "gated": lambda: operators.gated(x, x, "silu", 1.0, None, 0.0),
        "norm_act": lambda: operators.norm_act(x, None, vector, None, None, 1e-6, 0.0, "layer", "identity"),
        "qk_norm_rope": lambda: operators.qk_norm_rope(heads, heads, vector, vector, angles, angles, 1e-6, False, 0.0),
        "rms_norm": lambda: operators.rms_norm(x, vector, 1e-6, 0.0, "none"),
        "rotary_embedding": lambda: operators.rotary_embedding(heads, angles, angles, False),
        "softmax": lambda: operators.softmax(x, None, 1.0),
    }


@pytest.mark.parametrize("name", calls("cpu"))
def test_the_rung_reaches_every_operator(name, device):
    if device.type == "cpu" and LIBRARY.instruction_sets != ("CUDA, emulated",):
        pytest.skip("the CPU backend is one kernel")
    call = calls(device)[name]
    call()
    with rung(99), pytest.raises(RuntimeError, match="could not launch"):
        call()


def test_every_operator_with_numbered_kernels_is_asked():
    folders = {file.parents[1].name for file in (FILE.parents[1] / "csrc").glob("*/kernels/1_*.cuh")}
    assert folders == set(calls("cpu"))


@pytest.mark.parametrize("operation", [each.name for each in operations])
def test_numbered_levels_take_the_cases_of_their_operation(operation, device):
    asked = next(each for each in operations if each.name == operation)
    numbered = [each for each in asked.implementations if isinstance(each, Rung)]
    assert len(numbered) >= 2
    for rung_ in numbered:
        cases = [case for case in asked.test_grid if case.core and not asked.why_lacking(rung_.name, case)]
        taken = 0
        for case in cases:
            arguments = asked.arguments(case, torch.Generator(device).manual_seed(0))
            try:
                outputs = rung_.load()(*arguments)
            except NotImplementedError:  # it is for other shapes: vectors of columns, rows that fit its registers
                continue
            assert all(output.isfinite().all() for output in (outputs if isinstance(outputs, tuple) else (outputs,)))
            taken += 1
        assert taken > 0 or rung_.number > 1, "the first kernel is for all shapes"


def test_a_kernel_that_sums_in_order_refuses_long_rows(device):
    naive = next(each for each in operations if each.name == "rms_norm").implementation("1_naive")
    weight = torch.ones(LONGEST_IN_ORDER + 1, device=device)
    naive.load()(torch.randn(2, LONGEST_IN_ORDER, device=device), weight[1:], 1e-6, 0.0, "llama")
    with pytest.raises(NotImplementedError, match="adds a row in order"):
        naive.load()(torch.randn(2, LONGEST_IN_ORDER + 1, device=device), weight, 1e-6, 0.0, "llama")


def test_rungs_are_those_of_the_folder(rungs):
    numbers = {kernel.name: kernel.rungs() for kernel in rungs.KERNELS_TIMED}
    assert numbers["rms_norm"] == {"1_naive": 1, "2_block": 2, "3_vectorized": 3, "4_ring": 4, "picked": 0}
    assert numbers["rms_norm_backward"] == {"picked": 0}


@pytest.mark.cpu_backend
@pytest.mark.parametrize("index", range(14))
def test_every_kernel_is_timed_beside_a_copy_that_moves_as_much(rungs, index):
    kernel = rungs.KERNELS_TIMED[index]
    found = rungs.shares(kernel, 64, torch.float32, torch.device("cpu"), elements=4096, rounds=8)
    assert found.keys() == kernel.rungs().keys()
    assert all(share.low > 0 for share in found.values())
    assert len(rungs.KERNELS_TIMED) == 14


@pytest.mark.cpu_backend
def test_a_rung_that_refuses_is_left_out(rungs):
    def call(x, vectors):
        if chosen() == 2:
            raise RuntimeError("rows are too long for 2")
        return x[0].clone()

    kernel = rungs.Kernel("made up", "rms_norm", 2, 1, call)
    found = rungs.shares(kernel, 64, torch.float32, torch.device("cpu"), elements=4096, rounds=8)
    assert set(found) == {"1_naive", "3_vectorized", "4_ring", "picked"}


@pytest.mark.cpu_backend
def test_the_command_prints_a_table(rungs, capsys):
    options = "--operator rms_norm --columns 64 --elements 4096 --rounds 8 --device cpu"
    rungs.main(options.split())
    printed = capsys.readouterr().out
    assert "rms_norm, bfloat16, x of 0.0078125 MiB: speed over that of a copy" in printed
    assert "4_ring" in printed
