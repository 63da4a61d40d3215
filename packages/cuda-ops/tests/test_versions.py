"""The benchmark of numbered kernel versions: it finds them, times them beside a copy, and says which refused."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parents[1] / "benchmarks" / "versions.py"


@pytest.fixture(scope="module")
def versions():
    pytest.importorskip("rich")
    specification = importlib.util.spec_from_file_location("cuda_ops_versions", FILE)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # where dataclasses look for it
    specification.loader.exec_module(module)
    return module


def test_versions_are_those_of_the_folder(versions):
    numbers = {kernel.name: kernel.versions() for kernel in versions.KERNELS_TIMED}
    assert numbers["rms_norm"] == {"1_naive": 1, "2_block": 2, "3_vectorized": 3, "4_ring": 4, "picked": 0}
    assert numbers["rms_norm_backward"] == {"picked": 0}


@pytest.mark.twin
@pytest.mark.parametrize("index", range(14))
def test_every_kernel_is_timed_beside_a_copy_that_moves_as_much(versions, index):
    kernel = versions.KERNELS_TIMED[index]
    found = versions.shares(kernel, 64, torch.float32, torch.device("cpu"), elements=4096, rounds=8)
    assert found.keys() == kernel.versions().keys()
    assert all(share.low > 0 for share in found.values())
    assert len(versions.KERNELS_TIMED) == 14


@pytest.mark.twin
def test_a_version_that_refuses_is_left_out(versions):
    def call(x, vectors, version):
        if version == 2:
            raise RuntimeError("rows are too long for version 2")
        return x[0].clone()

    kernel = versions.Kernel("made up", "rms_norm", 2, 1, call)
    found = versions.shares(kernel, 64, torch.float32, torch.device("cpu"), elements=4096, rounds=8)
    assert set(found) == {"1_naive", "3_vectorized", "4_ring", "picked"}


@pytest.mark.twin
def test_the_command_prints_a_table(versions, capsys):
    options = "--operator rms_norm --columns 64 --elements 4096 --rounds 8 --device cpu"
    versions.main(options.split())
    printed = capsys.readouterr().out
    assert "rms_norm, bfloat16, x of 0.0078125 MiB: speed over that of a copy" in printed
    assert "4_ring" in printed
