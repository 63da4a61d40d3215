"""A case that raises, aborts, exits or hangs costs itself alone."""

import sys
from pathlib import Path

import pytest

from kernel_pytorch.harness.isolation import Worker


@pytest.fixture
def functions(monkeypatch):
    """The child finds them by name, on the path that it inherits."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import isolated_functions

    yield isolated_functions
    sys.modules.pop("isolated_functions")


ENDS = {
    "raises": ("raised ValueError: planted", "raising"),
    "aborts": ("its process was killed by SIGABRT", "aborting"),
    "exits": ("its process exited with code 3", ""),
    "exits_hard": ("its process exited with code 4", ""),
    "is_killed": ("its process was killed by SIGKILL", ""),
    "hangs": ("did not end within 5 seconds and was stopped", "hanging"),
}


@pytest.mark.parametrize("name", ENDS)
def test_failure_is_recorded_and_the_next_case_runs(functions, name):
    with Worker(timeout=5) as worker:
        failure, stage = ENDS[name]
        outcome = worker.call(getattr(functions, name))
        assert (outcome.value, outcome.failure, outcome.stage) == (None, failure, stage)
        assert worker.call(functions.double, 21).value == 42


def test_healthy_cases_share_a_process(functions):
    with Worker(timeout=30) as worker:
        first = worker.call(functions.process_id).value
        assert worker.call(functions.process_id).value == first
        worker.call(functions.exits)
        assert worker.call(functions.process_id).value != first


def test_stages_are_announced_while_the_case_runs(functions):
    seen = []
    with Worker(timeout=30) as worker:
        assert worker.call(functions.double, 1, on_stage=seen.append).stage == "doubling"
    assert seen == ["doubling"]


def test_the_child_ends_with_the_worker(functions):
    with Worker(timeout=30) as worker:
        worker.call(functions.double, 1)
        process = worker._process
    assert not process.is_alive()


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_timeout_must_be_positive(timeout):
    with pytest.raises(ValueError, match="timeout: given"):
        Worker(timeout)
