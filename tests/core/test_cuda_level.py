"""Which kernel_pytorch.cuda_ops is taken for level "cuda"."""

import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

CORE = Path(__file__).parents[2] / "core"


@pytest.fixture
def loaded(monkeypatch):
    """A core of its own, beside a compiled package of a version, or none."""
    monkeypatch.setitem(sys.modules, "kernel_pytorch.cuda_ops", types.ModuleType("kernel_pytorch.cuda_ops"))

    def load(version):
        def told(distribution):
            assert distribution == "kernel-pytorch-cuda-ops"
            if version is None:
                raise importlib.metadata.PackageNotFoundError(distribution)
            return version

        monkeypatch.setattr(importlib.metadata, "version", told)
        spec = importlib.util.spec_from_file_location("core_beside", CORE / "cuda_level.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("version", [None, "0.1.0", "0.2", "0.2rc1", "1", "1.0.0rc1"])
def test_a_version_that_will_do(version, loaded):
    assert loaded(version).cuda_ops is sys.modules["kernel_pytorch.cuda_ops"]


def test_an_older_version_is_refused_by_name(loaded):
    level = loaded("0.0.9")
    assert level.cuda_ops is None
    reason = "kernel-pytorch-cuda-ops 0.0.9 is installed; 0.1 or later is needed: install it again"
    assert level.unavailable(torch.device("cpu"), torch.float32) == reason
    with pytest.raises(ImportError, match=reason):
        level.function("rms_norm")()


def test_a_folder_that_was_left_behind_is_no_package(loaded, monkeypatch, tmp_path):
    """Python imports it as a namespace, which has none of the functions."""
    (tmp_path / "kernel_pytorch" / "cuda_ops").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "kernel_pytorch.cuda_ops")
    monkeypatch.setattr("kernel_pytorch.__path__", [str(tmp_path / "kernel_pytorch")])
    level = loaded(None)
    assert level.cuda_ops is None
    assert "a folder without its code" in level.unavailable(torch.device("cpu"), torch.float32)
