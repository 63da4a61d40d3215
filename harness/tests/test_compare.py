"""Two results files side by side: a planted slowdown, noise alone, a missing case, another device."""

import random

import pytest

from kernel_pytorch.harness.clock import Verdict, median_interval
from kernel_pytorch.harness.commands.compare import compare
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.results import CaseRecord, Measurement, Results


@pytest.fixture
def make_results(machine):
    """Results of one level on three cases; `factor` slows all of them down, `seed` makes other noise."""

    def make(factor=1.0, seed=0, cases=("one", "two", "three"), technique="toy", where=machine, method="wall clock"):
        noise = random.Random(seed)
        measurements = []
        for case in cases:
            samples = tuple(factor * 1e-3 * noise.gauss(1.0, 0.01) for _ in range(40))
            measurements.append(
                Measurement(
                    operation="gate",
                    case=CaseRecord(name=case, dtype="float32", sizes={"rows": 8}),
                    direction="forward",
                    implementation="native",
                    level="native",
                    status="measured",
                    seconds=median_interval(samples),
                    samples=samples,
                    method=method,
                )
            )
        return Results(
            technique=technique,
            created="2026-01-01T00:00:00+00:00",
            quick=False,
            machine=where,
            measurements=tuple(measurements),
        )

    return make


def verdicts(changes):
    return [change.comparison.verdict for change in changes]


def test_a_slowdown_of_ten_percent_is_found(make_results):
    changes = compare(make_results(), make_results(factor=1.1, seed=1))
    assert verdicts(changes) == [Verdict.SLOWER] * 3
    assert all(change.slower_than(0.05) for change in changes)
    assert not any(change.slower_than(0.15) for change in changes)


def test_noise_alone_is_neither_faster_nor_slower(make_results):
    for seed in range(1, 20):
        changes = compare(make_results(), make_results(seed=seed))
        assert set(verdicts(changes)) <= {Verdict.SAME, Verdict.UNSURE}
        assert not any(change.slower_than(0.0) for change in changes)


def test_a_missing_case_is_named(make_results):
    changes = compare(make_results(), make_results(cases=("one", "three", "four")))
    missing = {change.label.rpartition(", ")[2]: change.missing for change in changes if change.missing}
    assert missing == {"two rows=8 float32": "new: no such case", "four rows=8 float32": "old: no such case"}


def test_another_device_is_refused_unless_asked_for(make_results, machine):
    other = machine.model_copy(
        update={"environment": machine.environment.model_copy(update={"device_name": "Another CPU"})}
    )
    with pytest.raises(UserError, match="Made-up CPU with 2 threads, the new one on Another CPU with 2 threads"):
        compare(make_results(), make_results(where=other))
    assert len(compare(make_results(), make_results(where=other), across_devices=True)) == 3


def test_another_technique_is_refused(make_results):
    with pytest.raises(UserError, match="of technique 'toy', the new one of 'other'"):
        compare(make_results(), make_results(technique="other"))


def test_times_of_another_method_are_not_compared(make_results):
    changes = compare(make_results(), make_results(method="CUDA graph"))
    assert {change.missing for change in changes} == {"timed differently: wall clock and CUDA graph"}


@pytest.mark.parametrize(
    ("factor", "options", "code"),
    [
        (1.1, [], 0),
        (1.1, ["--fail-if-slower", "5%"], 1),
        (1.1, ["--fail-if-slower", "0.2"], 0),
        (1.0, ["--fail-if-slower", "0"], 0),
    ],
)
def test_exit_code(command_line, make_results, tmp_path, factor, options, code):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    make_results().save(old)
    make_results(factor=factor, seed=1).save(new)
    printed = command_line("compare", str(old), str(new), *options)
    assert printed.code == code, printed
    assert ("slower than allowed" in printed.out) == (code == 1)


@pytest.mark.parametrize("what", ["wrong", "gone"])
def test_a_figure_that_is_no_more_fails(command_line, make_results, tmp_path, what):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    results = make_results()
    results.save(old)
    *kept, last = results.measurements
    wrong = last.model_copy(update={"status": "wrong", "reason": "planted", "seconds": None})
    results.model_copy(update={"measurements": (*kept, *([wrong] if what == "wrong" else []))}).save(new)
    assert command_line("compare", str(old), str(new)).code == 0
    printed = command_line("compare", str(old), str(new), "--fail-if-slower", "5%")
    assert printed.code == 1
    assert "no figure any more" in printed.out
    assert ("new: wrong: planted" if what == "wrong" else "new: no such case") in printed.out
    assert command_line("compare", str(new), str(old), "--fail-if-slower", "5%").code == 0, "more is no loss"


def test_what_cannot_be_read_is_one_line(command_line, tmp_path):
    printed = command_line("compare", str(tmp_path / "none.json"), str(tmp_path / "none.json"))
    assert printed.code == 2
    assert printed.err.count("\n") == 1
    assert "No such file" in printed.err
    for share in ("much", "5"):
        assert f"given '{share}'" in command_line("compare", "a", "b", "--fail-if-slower", share).err
