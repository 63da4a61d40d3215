"""Verification and benchmarks from Python: the records that the commands print."""

import dataclasses

import pytest

import kernel_pytorch.harness
from kernel_pytorch.harness import Plan, api, bench, verify
from kernel_pytorch.harness.benchmark import SHORT
from kernel_pytorch.harness.discovery import Discovery, UnknownNameError


@pytest.fixture
def installed(toy, monkeypatch):
    """The toy, and nothing else."""
    monkeypatch.setattr(api, "discover", lambda: Discovery({"toy": toy.technique}, {}))
    return toy


def test_a_verification_is_a_report(installed):
    seen = []
    report = verify("toy", device="cpu", on_trial=seen.append)
    found = {level.implementation: level for level in report.levels}
    assert list(found) == ["reference", "native", "compile", "cuda"]
    assert all(level.right == level.ran and not level.failures for level in found.values())
    assert found["cuda"].unavailable == ("the toy has no kernel",)
    assert len(seen) == sum(level.ran + level.not_run for level in found.values())


def test_what_is_wrong_is_in_the_report(installed, monkeypatch):
    monkeypatch.setattr(installed, "native", lambda x, weight, factor: installed.reference(x, weight, factor) * 1.01)
    (level,) = verify("toy", levels=["native"], device="cpu").levels
    assert level.right < level.ran
    assert any("toy gate level 'native'" in line and "output is off by" in line for line in level.failures)


def test_a_benchmark_is_results(installed, machine):
    plan = dataclasses.replace(SHORT, levels=("native",))
    results = bench("toy", plan, device="cpu", machine=machine)
    assert results.complete
    assert {m.implementation for m in results.measurements} == {"reference", "native"}
    assert all(m.status == "measured" for m in results.measurements)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda machine: verify("door", device="cpu"), "no technique 'door'; installed are: toy"),
        (
            lambda machine: verify("toy", levels=["assembler"], device="cpu"),
            "toy has no level 'assembler'; there are: ref",
        ),
        (lambda machine: verify("toy", device="abacus"), "no device 'abacus'; available here are: cpu"),
        (
            lambda machine: bench("toy", Plan(operations=("door",)), device="cpu"),
            "toy has no operation 'door'; there are",
        ),
    ],
)
def test_what_does_not_exist_is_answered_with_what_does(installed, machine, call, message):
    with pytest.raises(UnknownNameError, match=message):
        call(machine)


def test_one_name_is_no_list_of_names(installed):
    with pytest.raises(TypeError, match=r"levels: given 'native'; allowed is a list of names, such as \['native'\]"):
        verify("toy", levels="native", device="cpu")


def test_the_package_offers_them():
    assert {"Plan", "bench", "verify"} <= set(kernel_pytorch.harness.__all__)
