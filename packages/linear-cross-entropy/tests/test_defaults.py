"""The default level, held against every committed measurement."""

from pathlib import Path

import pytest
import torch

from kernel_pytorch.harness.results import load
from kernel_pytorch.linear_cross_entropy import levels

FILES = sorted((Path(__file__).parents[3] / "results").glob("*/linear-cross-entropy.json"))


def default(file, m, monkeypatch):
    """What level=None means where this was measured."""
    environment = load(file).machine.environment
    if environment.compute_capability is not None:
        capability = tuple(map(int, environment.compute_capability.split(".")))
        monkeypatch.setattr(levels, "_capability", lambda device: capability)
    elements = torch.Size(m.case.sizes["shape"]).numel()
    return levels.default_level(torch.device(environment.device_type), getattr(torch, m.case.dtype), elements)


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
    """A level that lost to native somewhere, wherever one did."""
    for file in FILES:
        measurements = [m for m in load(file).measurements if m.status == "measured"]
        lost = {m.implementation for m in measurements if "native" in m.comparisons}
        if any(slower_than_native(measurements, lambda m, name=name: name) for name in lost):
            return
    pytest.skip("no results here in which a level loses to native")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_triton_is_the_default_only_where_it_was_measured_right_and_fastest(file, monkeypatch):
    for m in load(file).measurements:
        if default(file, m, monkeypatch) == "triton" and m.implementation == "triton":
            assert m.status == "measured", m.reason
            assert m.comparisons["native"].verdict in ("FASTER", "SAME", "UNSURE")
