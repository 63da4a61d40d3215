"""Jobs are measured one after the other; what stands is kept, and an interrupted run can go on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_pytorch.harness import timing
from kernel_pytorch.harness.benchmark import Plan, bench, why_not_resumed
from kernel_pytorch.harness.exemptions import BACKWARD_TIME
from kernel_pytorch.harness.overheads import Call
from kernel_pytorch.harness.technique import Direction, Exemption
from kernel_pytorch.harness.workload import find_job, jobs

CPU = torch.device("cpu")
QUICK = Plan(quick=True)


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch):
    """Few input sets: the times themselves are not looked at."""
    monkeypatch.setattr(timing, "sets_needed", lambda *arguments, **options: 3)


def interrupt_at(job):
    """A progress callback that acts as Ctrl-C at the start of a job, counted from 1."""
    labels = []

    def on_job(label):
        labels.append(label)
        if len(labels) == job:
            raise KeyboardInterrupt

    return on_job


def cases(results):
    return list(dict.fromkeys((m.case.name, m.direction) for m in results.measurements))


def test_a_short_run_is_the_first_cases_in_both_directions(toy):
    found = jobs(toy.technique, CPU, first=2)
    assert [(job.case.name, job.direction.value) for job in found] == [
        (case, direction) for case in ("small", "larger") for direction in ("forward", "backward")
    ]
    assert len(jobs(toy.technique, CPU)) == 6
    assert found[0].label == "gate forward, small rows=8 columns=64 float32"


def test_an_operation_says_which_directions_are_timed(toy):
    """One that computes its gradients in the forward, for example."""
    (gate,) = toy.technique.operations
    together = dataclasses.replace(gate, exemptions=[Exemption((BACKWARD_TIME,), "a good one")])
    technique = dataclasses.replace(toy.technique, operations=[together])
    assert [job.direction.value for job in jobs(technique, CPU, first=1)] == ["forward", "both"]
    assert [job.direction.value for job in Plan(quick=True, cases=1).jobs(technique, CPU)] == ["forward", "both"]
    assert len(jobs(technique, CPU, directions=(Direction.BACKWARD,))) == 3


def test_a_job_is_found_again_by_its_key(site, toy):
    site.install_toy()
    for job in jobs(toy.technique, CPU):
        assert find_job(job.key, CPU).key == job.key
    with pytest.raises(KeyError, match="no job toy, gate, nope, forward"):
        find_job(("toy", "gate", "nope", "forward"), CPU)


def test_results_identify_their_code(toy, machine):
    found = bench(toy.technique, device=CPU, machine=machine, plan=Plan(quick=True, directions=(Direction.FORWARD,)))
    assert found.complete
    assert found.quick
    assert list(found.identities) == ["gate/reference", "gate/native", "gate/compile"]  # the toy has no kernel
    assert {i.made_by for i in found.identities.values()} == {f"torch {torch.__version__.partition('+')[0]}"}
    assert len(found.measurements) == 2 * 4


def test_baselines_run_even_where_another_level_is_wanted(toy, machine):
    found = bench(toy.technique, device=CPU, machine=machine, plan=Plan(levels=("compile",), quick=True))
    assert {m.implementation for m in found.measurements} == {"reference", "native", "compile"}


def test_after_an_interruption_what_was_measured_stays(toy, machine):
    found = bench(toy.technique, device=CPU, machine=machine, plan=QUICK, on_job=interrupt_at(2))
    assert not found.complete
    assert cases(found) == [("small", "forward")]
    assert [m.status for m in found.measurements] == ["measured", "measured", "measured", "unavailable"]


def test_what_stands_is_handed_out_after_every_job(toy, machine):
    progress = []
    found = bench(toy.technique, device=CPU, machine=machine, plan=QUICK, on_progress=progress.append)
    assert [len(cases(results)) for results in progress] == [1, 2, 3, 4]
    assert not any(results.complete for results in progress)
    assert progress[-1].measurements == found.measurements


def test_an_interrupted_run_goes_on_where_it_stopped(toy, machine):
    first = bench(toy.technique, device=CPU, machine=machine, plan=QUICK, on_job=interrupt_at(3))
    assert why_not_resumed(first, toy.technique, machine, QUICK) is None
    whole = bench(toy.technique, device=CPU, machine=machine, plan=QUICK, previous=first)
    assert whole.complete
    assert len(cases(whole)) == 4
    assert whole.measurements[: len(first.measurements)] == first.measurements


def test_a_run_goes_on_only_if_it_would_be_the_same(toy, machine):
    first = bench(toy.technique, device=CPU, machine=machine, plan=QUICK, on_job=interrupt_at(2))
    assert why_not_resumed(first, toy.technique, machine, Plan()) == "it was a short run"
    for update, reason in [
        ({"device_name": "Another CPU"}, "it was measured on Another CPU"),
        ({"torch": "2.0.0", "triton": None}, "it was measured with torch 2.0.0 and triton None"),
    ]:
        environment = machine.environment.model_copy(update=update)
        elsewhere = first.model_copy(update={"machine": machine.model_copy(update={"environment": environment})})
        assert why_not_resumed(elsewhere, toy.technique, machine, QUICK) == reason
    native = first.identities["gate/native"].model_copy(update={"sources": {"toy": "another"}})
    for identities in ({}, first.identities | {"gate/native": native}):
        changed = first.model_copy(update={"identities": identities})
        assert "has changed, or is not known" in why_not_resumed(changed, toy.technique, machine, QUICK)


def test_a_resumed_run_that_is_interrupted_keeps_what_it_has_not_reached(toy, machine):
    whole = bench(toy.technique, device=CPU, machine=machine, plan=QUICK)
    again = bench(toy.technique, device=CPU, machine=machine, plan=QUICK, previous=whole, on_job=interrupt_at(2))
    assert not again.complete
    assert again.measurements == whole.measurements


def test_what_a_resumed_run_does_not_ask_for_is_kept(toy, machine):
    whole = bench(toy.technique, device=CPU, machine=machine, plan=QUICK)
    less = Plan(levels=("native",), quick=True, directions=(Direction.FORWARD,))
    again = bench(toy.technique, device=CPU, machine=machine, plan=less, previous=whole)
    assert again.measurements == whole.measurements


def test_overheads_outlast_a_run_that_does_not_ask_for_them(toy, machine):
    whole = bench(toy.technique, device=CPU, machine=machine, plan=QUICK)
    costs = (
        Call(toy.technique, toy.gate, toy.gate.reference, toy.gate.bench_grid.cases("cpu")[0], CPU).no_cost("made up"),
    )
    before = whole.model_copy(update={"costs": costs})
    for on_job in (lambda label: None, interrupt_at(1)):
        again = bench(toy.technique, device=CPU, machine=machine, plan=QUICK, previous=before, on_job=on_job)
        assert again.costs == costs


def test_a_job_that_lacks_a_level_is_measured_again_with_those_that_it_has(toy, machine):
    one = Plan(levels=("native",), quick=True, directions=(Direction.FORWARD,))
    other = Plan(levels=("compile",), quick=True, directions=(Direction.FORWARD,))
    first = bench(toy.technique, device=CPU, machine=machine, plan=one)
    assert {m.implementation for m in first.measurements} == {"reference", "native"}
    both = bench(toy.technique, device=CPU, machine=machine, plan=other, previous=first)
    again = bench(
        toy.technique, device=CPU, machine=machine, plan=Plan(("cuda",), True, (Direction.FORWARD,)), previous=both
    )
    assert {m.implementation for m in again.measurements} == {"reference", "native", "compile", "cuda"}


def test_what_nobody_knows_yet_is_measured_before_what_lacks_a_level(toy, machine):
    """Else a run that adds a level to many cases would time those again before it came to the new ones."""
    first = bench(toy.technique, device=CPU, machine=machine, plan=Plan(("native",), True), on_job=interrupt_at(3))
    labels = []
    bench(toy.technique, device=CPU, machine=machine, plan=QUICK, previous=first, on_job=labels.append)
    of_case = [label.split(",")[1].split()[0] for label in labels]
    assert of_case == ["larger", "larger", "small", "small"]


@pytest.mark.slow
def test_only_the_operations_that_are_asked_for_are_measured(toy, machine):
    other = dataclasses.replace(toy.gate, name="other")
    both = dataclasses.replace(toy.technique, operations=[toy.gate, other])
    found = bench(
        both, device=CPU, machine=machine, plan=Plan(("native",), True, operations=("other",), overheads=True)
    )
    assert {m.operation for m in found.measurements} == {"other"}
    assert {cost.operation for cost in found.costs} == {"other"}
    whole = bench(both, device=CPU, machine=machine, plan=Plan(("native",), True, operations=("gate",)), previous=found)
    assert {m.operation for m in whole.measurements} == {"gate", "other"}


def test_ceilings_are_measured_again_before_anything_is_rejected_by_them(toy, machine, make_machine):
    busy, plan = make_machine(1.0), Plan(("native",), quick=True, directions=(Direction.FORWARD,))
    rejected = bench(toy.technique, device=CPU, machine=busy, plan=plan)
    assert {m.status for m in rejected.measurements} == {"rejected"}
    asked = []
    again = lambda: asked.append(1) or machine.ceilings  # noqa: E731
    found = bench(toy.technique, device=CPU, machine=busy, plan=plan, again=again)
    assert {m.status for m in found.measurements} == {"measured"}
    assert (found.machine.ceilings, asked) == (machine.ceilings, [1])
    slow = bench(toy.technique, device=CPU, machine=busy, plan=plan, again=lambda: asked.append(1) or busy.ceilings)
    assert {m.status for m in slow.measurements} == {"rejected"}
    assert len(asked) == 1 + 2, "once for each of the two jobs"


def test_a_machine_that_is_still_busy_at_the_first_rejection_is_measured_again_at_the_next(toy, machine, make_machine):
    busy, plan = make_machine(1.0), Plan(("native",), quick=True, directions=(Direction.FORWARD,))
    answers = iter([busy.ceilings, machine.ceilings])
    found = bench(toy.technique, device=CPU, machine=busy, plan=plan, again=lambda: next(answers))
    assert [m.status for m in found.measurements] == ["rejected"] * 2 + ["measured"] * 2
