"""The default level, held against every committed measurement: never slower than native, nor than the other levels."""

from pathlib import Path

import pytest
import torch

from kernel_pytorch.harness.results import load
from kernel_pytorch.rmsnorm import levels

FILES = sorted((Path(__file__).parents[3] / "results").glob("*/rmsnorm.json"))
# The first call of the other levels compiles for seconds, so they are no candidates.
CANDIDATES = ("reference", "native", "triton")


def default(file, m, monkeypatch):
    """What level=None means where this was measured."""
    environment = load(file).machine.environment
    if environment.compute_capability is not None:
        capability = tuple(map(int, environment.compute_capability.split(".")))
        monkeypatch.setattr(levels, "_capability", lambda device: capability)
    elements = torch.Size(m.case.sizes["shape"]).numel()
    return levels.default_level(torch.device(environment.device_type), getattr(torch, m.case.dtype), elements)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_default_is_the_fastest_level_that_was_measured(file, monkeypatch):
    measurements = [m for m in load(file).measurements if m.status == "measured"]
    assert measurements
    for m in measurements:
        chosen = default(file, m, monkeypatch)
        if m.implementation not in CANDIDATES or m.implementation == chosen:
            continue
        beside = m.comparisons.get(chosen)
        where = f"{m.operation} {m.direction} {m.case.label}: {m.implementation} beside the default {chosen}"
        assert beside is None or beside.verdict != "FASTER" or beside.speedup.low < 1.05, f"{where}: {beside}"


def test_results_are_committed():
    if not (Path(__file__).parents[3] / "noxfile.py").is_file():
        pytest.skip("not a checkout")
    assert FILES
