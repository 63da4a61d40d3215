"""A case that raises, aborts, exits or hangs costs itself alone."""

import functools
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kernel_pytorch.harness import isolation
from kernel_pytorch.harness.isolation import Worker, Workers


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
    "not_picklable": ("raised AttributeError: Can't pickle local object 'not_picklable.<locals>.<lambda>'", ""),
    "hangs": ("did not end within 5 seconds and was stopped", "hanging"),
}


@pytest.mark.parametrize("name", ENDS)
def test_failure_is_recorded_and_the_next_case_runs(functions, name):
    with Worker(timeout=5) as worker:
        failure, stage = ENDS[name]
        outcome = worker.call(getattr(functions, name))
        found = outcome.failure.replace("Can't get", "Can't pickle")  # before Python 3.12
        assert (outcome.value, found, outcome.stage) == (None, failure, stage)
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


def test_variables_are_set_in_the_child_alone(functions, monkeypatch):
    monkeypatch.setenv("PLANTED", "mine")
    with Worker(30, functools.partial(isolation.set_environment, {"PLANTED": "other"})) as worker:
        assert worker.call(functions.variable, "PLANTED").value == "other"
    assert os.environ["PLANTED"] == "mine"


def test_a_child_that_cannot_start_is_reported(functions):
    with Worker(30, functions.prepares_badly) as worker:
        assert worker.call(functions.double, 1).failure == "raised ValueError before the first call: planted"


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_timeout_must_be_positive(timeout):
    with pytest.raises(ValueError, match="timeout: given"):
        Worker(timeout)


# Several side by side.


def test_several_run_side_by_side_and_answer_in_order(functions):
    """Two that wait for each other can only end together."""
    with Workers(2, timeout=60) as workers:
        barrier = threading.Barrier(2, timeout=60)

        def ask(number):
            barrier.wait()
            return workers.call(functions.double, number).value

        assert list(workers.map(ask, range(6))) == [0, 2, 4, 6, 8, 10]


def test_each_is_a_process_of_its_own_and_no_more_than_asked_for(functions):
    with Workers(2, timeout=60) as workers:
        found = {workers.call(functions.process_id).value for _ in range(6)}
    assert len(found) == 2


def test_what_dies_in_one_costs_the_others_nothing(functions):
    with Workers(2, timeout=60) as workers:
        names = ["aborts", "double", "exits", "double"]
        arguments = {"double": (21,)}
        found = list(workers.map(lambda n: workers.call(getattr(functions, n), *arguments.get(n, ())), names))
    assert [outcome.value for outcome in found] == [None, 42, None, 42]
    assert [outcome.failure for outcome in found[::2]] == [ENDS[name][0] for name in names[::2]]


def test_leaving_ends_the_busy_the_waiting_and_the_queued(functions):
    """As Ctrl-C does while results are awaited."""
    asked = []

    def ask(item):
        asked.append(item)
        return workers.call(functions.hangs)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Workers(2, timeout=600) as workers:
        workers.map(ask, range(50))
        while len(asked) < 2 or not all(worker._process for worker in workers._busy):
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert time.monotonic() - started < 300  # none of the hours that they would hang
    assert len(asked) <= 4
    assert all(worker._process is None for worker in workers._all)
    with pytest.raises(RuntimeError, match="closed"):
        workers.call(functions.process_id)


def test_at_least_one_is_needed():
    with pytest.raises(ValueError, match="processes: given 0; at least 1"):
        Workers(0, timeout=1)


def test_a_faulty_gpu_costs_the_process_but_not_the_answer(monkeypatch):
    """What the child does after each answer: a fault of the GPU stays, although somebody caught the error."""
    assert isolation._is_usable()  # no GPU in use
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(isolation.signal, "signal", lambda *_: None)
    sent = []

    def serve(function):
        with pytest.raises(SystemExit):
            isolation._serve(Sink(sent, function), None)

    serve(lambda announce: 1)

    def faulty():
        raise RuntimeError("misaligned address")

    monkeypatch.setattr(torch.cuda, "synchronize", faulty)
    serve(lambda announce: 2)
    assert [each for each in sent if each != ("started", None)] == [("value", 1), ("last value", 2)]


class Sink:
    """The child's end of a pipe, whose parent asks for one call and ends."""

    def __init__(self, sent, function):
        self.send, self.asked = sent.append, [(function, ())]

    def recv(self):
        if not self.asked:
            raise EOFError
        return self.asked.pop()
