"""The default level, held against every committed measurement."""

from pathlib import Path

import pytest
import torch

from kernel_pytorch.harness.models.record import FILE as MODELS
from kernel_pytorch.harness.models.record import load as load_models
from kernel_pytorch.harness.results import load
from kernel_pytorch.qkv_fusion._core import levels
from kernel_pytorch.qkv_fusion.levels import LADDER

ROTATED = ("llama", "qwen3", "gemma2")  # of the models of the benchmark, those with a rotary embedding
FILES = sorted((Path(__file__).parents[3] / "results").glob("*/qkv-fusion.json"))


def default(file, m, monkeypatch):
    """What level=None means where this was measured."""
    environment = load(file).machine.environment
    if environment.compute_capability is not None:
        capability = tuple(map(int, environment.compute_capability.split(".")))
        monkeypatch.setattr(levels, "compute_capability", lambda device: capability)
        monkeypatch.setattr(LADDER, "unavailable", lambda *asked: None)  # as where cuda-ops is installed with CUDA
    return LADDER.default(m.operation, torch.device(environment.device_type), getattr(torch, m.case.dtype))


def slower_than_native(measurements, choose):
    """What a choice of level loses to native, by the verdicts of the clock."""
    return [
        f"{m.operation} {m.direction} {m.case.label}"
        for m in measurements
        if m.implementation == choose(m) and "native" in m.comparisons and m.comparisons["native"].verdict == "SLOWER"
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_default_is_never_slower_than_native(file, monkeypatch):
    measurements = [m for m in load(file).measurements if m.status == "measured"]
    assert measurements
    assert not slower_than_native(measurements, lambda m: default(file, m, monkeypatch))


def test_a_wrong_default_would_be_found():
    """The reference loses to native for one decoded token, wherever that was measured on a CPU."""
    file = next((file for file in FILES if load(file).machine.environment.device_type == "cpu"), None)
    if file is None:
        pytest.skip("no results of a CPU here")
    found = slower_than_native([m for m in load(file).measurements if m.status == "measured"], lambda m: "reference")
    assert any("decode" in label for label in found)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_a_kernel_is_the_default_only_where_it_was_measured_right_and_fastest(file, monkeypatch):
    found = [m for m in load(file).measurements if m.implementation != "native"]
    chosen = [m for m in found if m.implementation == default(file, m, monkeypatch)]
    assert chosen
    for m in chosen:
        assert m.status == "measured", m.reason
        assert m.comparisons["native"].verdict in ("FASTER", "SAME", "UNSURE")


def test_what_was_never_measured_is_no_default():
    for row in LADDER.defaults:
        file = next(file for file in FILES if file.parent.name == row.record)
        measured = {m.operation for m in load(file).measurements if m.status == "measured" and m.level == row.level}
        assert set(row.functions) <= measured


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_where_cuda_ops_is_not_installed_the_default_is_no_slower_either(file, monkeypatch):
    environment = load(file).machine.environment
    if environment.compute_capability is None:
        pytest.skip("on a CPU it is native then")
    measured = [m for m in load(file).measurements if m.status == "measured"]
    choose = {}
    for m in measured:
        default(file, m, monkeypatch)  # as on the device
        monkeypatch.setattr(LADDER, "unavailable", lambda level, *asked: "absent" if level == "cuda" else None)
        choose[m.operation] = LADDER.default(m.operation, torch.device("cuda"), torch.bfloat16)
    assert {"rotary_embedding", "qk_norm_rope", "qkv_norm_rope"} == {
        f for f, level in choose.items() if level == "triton"
    }
    assert not slower_than_native(measured, lambda m: choose[m.operation])


def test_models_are_no_slower_with_the_rotation():
    file = next(file for file in FILES if file.parent.name == "nvidia-h200")
    runs = load_models(file.with_name(MODELS)).runs.values()
    rows = [r for run in runs if "qkv-fusion" in run.packages for r in run.rows if r.variant == "ours"]
    rows = [r for r in rows if r.model in ROTATED]
    assert {"llama", "qwen3"} <= {r.model for r in rows}
    for r in rows:
        assert r.ratio.median >= 1.0  # its interval may reach below: that is no verdict
        assert r.cost.difference < 0.05


def test_results_are_committed():
    if not (Path(__file__).parents[3] / "noxfile.py").is_file():
        pytest.skip("not a checkout")
    assert FILES
