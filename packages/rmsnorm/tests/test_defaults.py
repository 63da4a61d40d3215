"""The default level, held against every committed measurement."""

from pathlib import Path

import pytest
import torch

from kernel_pytorch.harness.results import load
from kernel_pytorch.rmsnorm import levels

FILES = sorted((Path(__file__).parents[3] / "results").glob("*/rmsnorm.json"))


def default(file, m, monkeypatch):
    """What level=None means where this was measured."""
    environment = load(file).machine.environment
    if environment.compute_capability is not None:
        capability = tuple(map(int, environment.compute_capability.split(".")))
        monkeypatch.setattr(levels, "_capability", lambda device: capability)
    elements = torch.Size(m.case.sizes["shape"]).numel()
    return levels.default_level(torch.device(environment.device_type), getattr(torch, m.case.dtype), elements)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_default_is_never_slower_than_native(file, monkeypatch):
    measurements = [m for m in load(file).measurements if m.status == "measured"]
    assert measurements
    for m in measurements:
        if m.implementation == default(file, m, monkeypatch) and "native" in m.comparisons:
            assert m.comparisons["native"].verdict != "SLOWER", f"{m.operation} {m.direction} {m.case.label}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_triton_is_the_default_only_where_it_was_measured_right_and_fastest(file, monkeypatch):
    for m in load(file).measurements:
        if default(file, m, monkeypatch) == "triton" and m.implementation == "triton":
            assert m.status == "measured", m.reason
            assert m.comparisons["native"].verdict in ("FASTER", "SAME", "UNSURE")


def test_results_are_committed():
    if not (Path(__file__).parents[3] / "noxfile.py").is_file():
        pytest.skip("not a checkout")
    assert FILES
