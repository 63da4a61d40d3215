"""examples/deployment.py: four ways of serving give the same answers, and refuse what does not fit."""

import json
import re

import pytest
import torch


@pytest.fixture
def deployment(example):
    return example("deployment")


def test_a_record_that_does_not_fit_is_refused_with_each_difference(deployment):
    record = json.loads(json.dumps(deployment.surroundings("cpu")))
    deployment.check_surroundings(record, "cpu")
    both = re.escape(f"torch is '{torch.__version__}', made with '2.3.0'; capability is")
    with pytest.raises(RuntimeError, match=both):
        deployment.check_surroundings(record | {"torch": "2.3.0", "capability": "none"}, "cpu")


@pytest.mark.examples
def test_all_ways_answer_the_same_in_fresh_processes(deployment, tmp_path, capsys):
    served = deployment.main(["--quick", "--out", str(tmp_path)])
    assert set(served) >= {"eager", "compile", "native"}
    for way, found in served.items():
        assert found["error"] < 1e-5, way
        assert found["p50"] <= found["p99"], way
        needs_ours = way in ("eager", "compile")
        assert bool(found["ours"]) == needs_ours, "a package needs no Python of ours"
    for way in set(served) & {"native", "cuda"}:
        assert "dim value is too large at 0, expected to be <= 8, but got: 9" in served[way]["beyond"]
        assert 0 < served[way]["loader"] < served[way]["load"]
    printed = capsys.readouterr().out
    assert "To the first answer of a fresh process: " in printed
    assert printed.splitlines()[-1] == f"packages, caches and records: {tmp_path}"
