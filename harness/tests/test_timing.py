"""A figure is recorded only of what is right before and after, possible on this machine, and set beside its peers."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from kernel_pytorch.harness import timing
from kernel_pytorch.harness.clock.statistics import FEWEST_ROUNDS
from kernel_pytorch.harness.noise import Reading
from kernel_pytorch.harness.report import cells, reasons
from kernel_pytorch.harness.results import Results
from kernel_pytorch.harness.technique import Direction
from kernel_pytorch.harness.workload import jobs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch):
    """Few input sets: the times themselves are not looked at."""
    monkeypatch.setattr(timing, "sets_needed", lambda *arguments, **options: 3)


def recording(function, inputs):
    """The function, which remembers what it was given."""

    def record(x, weight, factor):
        inputs.add((tuple(x.flatten().tolist()), tuple(weight.tolist())))
        return function(x, weight, factor)

    return record


@pytest.fixture
def measured(toy, machine):
    """Measurements of the first case, by level."""

    def measure(direction=Direction.FORWARD, on=machine, wanted=None, **options):
        job = jobs(toy.technique, CPU, directions=(direction,))[0]
        found = timing.run_job(job, on, CPU, wanted, rounds=FEWEST_ROUNDS, **options)
        return {m.implementation: m for m in found}

    return measure


@pytest.mark.parametrize("direction", Direction)
def test_what_runs_is_measured_and_what_does_not_says_why(measured, direction):
    found = measured(direction)
    assert list(found) == ["reference", "native", "compile", "cuda"]
    assert (found["cuda"].status, found["cuda"].reason) == ("unavailable", "the toy has no kernel")
    for name in ("reference", "native", "compile"):
        m = found[name]
        assert (m.status, m.reason, m.direction) == ("measured", "", direction.value)
        assert len(m.samples) == FEWEST_ROUNDS
        assert m.seconds.low <= m.seconds.median <= m.seconds.high
        assert m.bytes == 2 * 8 * 64 * 4
        assert m.bytes_per_second == pytest.approx(m.bytes / m.seconds.median)
        assert m.same_size
        assert 0.0 < m.share_of_copy < 10.0
        assert m.error_over_budget <= 1.0


def test_comparisons_hold_every_pytorch_level_but_the_level_itself(measured):
    found = measured()
    levels = {"reference", "native", "compile"}
    assert {name: set(found[name].comparisons) for name in levels} == {name: levels - {name} for name in levels}


def test_what_crashed_before_is_not_run_again(measured, toy, monkeypatch):
    def fatal(x, weight, factor):
        raise SystemExit("run again")

    monkeypatch.setattr(toy, "native", fatal)
    announced = []
    found = measured(excluded={"native": "its process was killed by SIGSEGV"}, announce=announced.append)
    assert (found["native"].status, found["native"].reason) == ("crashed", "its process was killed by SIGSEGV")
    assert set(found["reference"].comparisons) == {"compile"}
    assert announced == ["reference", "compile", "cuda", "timing"]


def test_what_takes_most_memory_is_named_where_all_together_take_too_much(measured, monkeypatch):
    """So that whoever runs the case again leaves it out."""
    announced = []
    peaks = {"reference": 3 * 2**30, "native": 2**30, "compile": 2**30}

    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")

    with monkeypatch.context() as patched:
        patched.setattr(timing.JobRun, "time", full)
        patched.setattr(timing, "_peak_bytes", lambda device: peaks[announced[-1]])
        with pytest.raises(RuntimeError, match=rf"^{timing.TOO_LARGE}: a call takes 3.0 GiB, CUDA out.*y$") as error:
            measured(announce=announced.append)
    assert announced[-2:] == ["timing", "reference"]
    left_out = measured(excluded={"reference": f"raised RuntimeError: {error.value}"})["reference"]
    assert left_out.status == "unavailable"
    assert left_out.reason.endswith("a call takes 3.0 GiB, CUDA out of memory")


def test_a_wrong_level_of_ours_is_not_timed(measured, toy, monkeypatch):
    monkeypatch.setattr(toy, "unavailable", lambda level, device, dtype: None)
    monkeypatch.setattr(toy, "cuda", lambda x, weight, factor: toy.reference(x, weight, factor) * 1.01)
    found = measured()
    assert found["cuda"].status == "wrong"
    assert found["cuda"].reason.startswith("output is off by")
    assert found["cuda"].samples == ()


def test_a_level_of_pytorch_over_its_budget_is_timed_and_shown_as_what_it_is(measured, toy, monkeypatch, machine):
    monkeypatch.setattr(toy, "native", lambda x, weight, factor: toy.reference(x, weight, factor) * 1.00001)
    found = measured()
    native = found["native"]
    assert (native.status, len(native.samples)) == ("measured", FEWEST_ROUNDS)
    assert native.error_over_budget > 1.0
    assert "native" in found["reference"].comparisons
    shown = f"{native.error_over_budget:.1f}x of the budget"
    assert cells(native, None)[-1] == shown
    about = {"technique": "toy", "created": "", "quick": True, "machine": machine}
    notes = reasons(Results(**about, measurements=tuple(found.values())))
    assert sum(f": error {shown}: output is off by" in note for note in notes) == 1


def test_a_miss_that_fresh_inputs_do_not_repeat_is_none(measured, toy, monkeypatch):
    monkeypatch.setattr(toy, "unavailable", lambda level, device, dtype: None)
    first = timing.expect(toy.gate, timing.Trial(toy.gate.bench_grid.cases("cpu")[0], timing.RANDOM), CPU)

    def unlucky(x, weight, factor):
        return toy.native(x, weight, factor) * (1.00001 if torch.equal(x, first.arguments[0]) else 1.0)

    monkeypatch.setattr(toy, "cuda", unlucky)
    assert measured()["cuda"].status == "measured"


def test_a_wrong_gradient_matters_only_where_gradients_are_timed(measured, toy, monkeypatch):
    monkeypatch.setattr(toy, "native", lambda x, weight, factor: toy.reference(x, weight.detach(), factor))
    assert measured()["native"].status == "measured"
    found = measured(Direction.BACKWARD)["native"]
    assert (found.status, found.reason) == ("wrong", "gradient of weight is missing (None)")


def test_what_is_faster_than_the_machine_is_rejected(measured, make_machine):
    found = measured(on=make_machine(1.0))
    for name in ("reference", "native", "compile"):
        assert found[name].status == "rejected"
        assert "times the fastest stream measured on this machine" in found[name].reason
        assert found[name].comparisons == {}


def test_what_was_rejected_is_no_baseline(measured, toy, monkeypatch, make_machine):
    native = toy.native
    monkeypatch.setattr(toy, "native", lambda *arguments: (time.sleep(5e-3), native(*arguments))[1])
    found = measured(on=make_machine(2e6))  # 4 KiB in 5 ms is possible there, in less than 2 ms it is not
    assert {name: found[name].status for name in ("native", "reference")} == {
        "native": "measured",
        "reference": "rejected",
    }
    assert found["native"].comparisons == {}


def test_all_levels_are_timed_on_the_same_inputs(toy, machine, monkeypatch):
    seen = {"reference": set(), "native": set()}
    for level, inputs in seen.items():
        monkeypatch.setattr(toy, level, recording(getattr(toy, level), inputs))
    implementations = [toy.gate.implementation(level) for level in seen]
    for direction in Direction:
        job = jobs(toy.technique, CPU, directions=(direction,))[0]
        timing.JobRun(job, machine, CPU, FEWEST_ROUNDS).time(implementations)
        assert len(seen["reference"]) == 3
        assert seen["reference"] == seen["native"]
        seen["reference"].clear()
        seen["native"].clear()


def test_a_backward_alone_can_be_repeated_under_torch_compile(measured, monkeypatch):
    assert measured(Direction.BACKWARD)["compile"].status == "measured"
    assert torch._functorch.config.donated_buffer, "the setting holds for the benchmark only"
    monkeypatch.setattr(timing, "_reusable_graphs", lambda direction: contextlib.nullcontext())
    with pytest.raises(RuntimeError, match="donated buffers"):
        measured(Direction.BACKWARD)


class Wavering:
    """A card whose clock is another at every reading."""

    interval = 1e-4

    def __init__(self):
        self.readings = 0

    def read(self):
        self.readings += 1
        slow = self.readings % 2 == 0
        return Reading(time.perf_counter(), 1e9 if slow else 2e9, 700.0, ("power cap",) if slow else ())


def test_samples_are_marked_where_the_clock_moved_and_conditions_kept(measured, monkeypatch):
    monkeypatch.setattr(timing, "reader_for", lambda device: Wavering())
    found = measured(wanted={"reference", "native"})
    conditions = found["native"].conditions
    assert (conditions.clock_hz.low, conditions.clock_hz.high) == (1e9, 2e9)
    assert conditions.power_watts.median == 700.0
    assert conditions.throttled == ("power cap",)
    assert found["native"].marked or found["reference"].marked
    assert set(found["native"].marked) <= set(range(FEWEST_ROUNDS))


def test_a_steady_clock_marks_nothing(measured, monkeypatch):
    class Steady(Wavering):
        def read(self):
            return Reading(time.perf_counter(), 2e9)

    monkeypatch.setattr(timing, "reader_for", lambda device: Steady())
    found = measured(wanted={"reference", "native"})
    assert all(m.marked == () and m.conditions.throttled == () for m in found.values())
