"""Every default is the fastest of the levels that its record has, up to the cases that a technique lists."""

from collections import defaultdict
from pathlib import Path

import pytest

from kernel_pytorch.harness.defaults import groups
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.results import load
from kernel_pytorch.rmsnorm.levels import LADDER

RESULTS = Path(__file__).parent.parent / "results"
TECHNIQUES = discover().techniques
FILES = [file for file in sorted(RESULTS.glob("*/*.json")) if file.stem in TECHNIQUES]
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}, {file.stem}")


def misses(file, listed=None):
    technique = TECHNIQUES[file.stem]
    found = groups(load(file), technique)
    return [miss for group in found for miss in group.misses(technique.slow_defaults if listed is None else listed)]


@each_file
def test_no_default_is_slower_than_another_level(file):
    assert not misses(file)


@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=lambda technique: technique.name)
def test_what_is_listed_as_slow_is_so_in_a_record(technique):
    files = [file for file in FILES if file.stem == technique.name]
    for listed in technique.slow_defaults:
        others = {case: reason for case, reason in technique.slow_defaults.items() if case != listed}
        assert any(misses(file, others) for file in files), listed


def test_a_slow_default_is_found(monkeypatch):
    file = RESULTS / "nvidia-h200" / "rmsnorm.json"
    assert not misses(file)
    monkeypatch.setattr(LADDER, "default", lambda *_, **__: "native")
    found = misses(file)
    assert {"rms_norm", "add_rms_norm"} <= {miss.partition(",")[0] for miss in found}


@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=lambda technique: technique.name)
def test_a_default_that_names_a_record_was_measured_right_there(technique):
    rows = [row for row in getattr(technique.ladder(), "defaults", ()) if row.record is not None]
    for row in rows:
        states = defaultdict(set)
        for m in load(RESULTS / row.record / f"{technique.name}.json").measurements:
            if m.implementation == row.level:
                states[m.operation].add(m.status)
        functions = row.functions or [operation.name for operation in technique.operations]
        assert {*functions} <= states.keys()
        assert not {"wrong", "rejected"} & set().union(*(states[name] for name in functions))
