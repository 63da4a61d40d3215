"""Operations without gradients are verified, timed and tested for support by their forward alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import pytest
import torch

from kernel_pytorch.harness import launches, overheads
from kernel_pytorch.harness.checks import check_compiled_equals_eager, check_deterministic, check_rows_independent
from kernel_pytorch.harness.exemptions import GRADIENTS, NO_GRADIENT
from kernel_pytorch.harness.overheads import FIGURES, Call
from kernel_pytorch.harness.support import CAPABILITIES, Shared, Subject, examine
from kernel_pytorch.harness.support import subject as subject_module
from kernel_pytorch.harness.technique import Direction, Exemption, grid, point
from kernel_pytorch.harness.timing import JobRun, run_job
from kernel_pytorch.harness.trials import RANDOM, Trial
from kernel_pytorch.harness.verification import expect, verify, verify_trial
from kernel_pytorch.harness.workload import Job, jobs

CPU = torch.device("cpu")
INFERENCE = [Exemption((GRADIENTS,), "for inference")]


def refusing(function):
    """The function, which raises where a gradient is wanted."""

    @functools.wraps(function)
    def refuse(x, weight, factor):
        if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
            raise RuntimeError("the gate has no gradients")
        return function(x, weight, factor)

    return refuse


@pytest.fixture
def inference(toy, monkeypatch):
    """The toy technique, whose levels refuse gradients and declare that."""
    for level in ("reference", "native", "compiled"):
        monkeypatch.setattr(toy, level, refusing(getattr(toy, level)))
    unsupported = {"double backward": NO_GRADIENT, "selective checkpointing": NO_GRADIENT, "opcheck": "no operator"}
    monkeypatch.setattr(
        toy, "gate", dataclasses.replace(
            toy.gate, exemptions=INFERENCE,
            levels=[dataclasses.replace(i, unsupported=unsupported) for i in toy.gate.implementations],
        ),
    )  # fmt: skip
    monkeypatch.setattr(toy, "technique", dataclasses.replace(toy.technique, operations=[toy.gate]))
    return toy


def failures(technique):
    return {v.implementation for v in verify(technique, CPU) if v.failures()}


def test_its_forward_is_verified(inference, monkeypatch):
    assert failures(inference.technique) == set()
    found = next(v for v in verify(inference.technique, CPU) if v.implementation == "native")
    assert [j.quantity for j in found.error_checks] == ["output"]
    wrong = refusing(lambda x, weight, factor: torch.sigmoid(x * weight) * factor * 1.01)
    monkeypatch.setattr(inference, "native", wrong)
    assert failures(inference.technique) == {"native"}


def test_an_operation_that_forgets_to_say_so_is_wrong(inference):
    silent = dataclasses.replace(inference.gate, exemptions=[])
    with pytest.raises(RuntimeError, match="the gate has no gradients"):
        expect(silent, Trial(inference.gate.test_grid.cases()[0], RANDOM), CPU)


def test_no_direction_but_the_forward_is_timed(inference, machine):
    assert {job.direction for job in jobs(inference.technique, CPU)} == {Direction.FORWARD}
    asked = jobs(inference.technique, CPU, directions=tuple(Direction))
    assert [job.direction for job in asked] == [Direction.FORWARD] * len(inference.gate.bench_grid.cases())
    measured = {m.implementation: m.status for m in run_job(asked[0], machine, CPU)}
    assert measured["native"] == "measured"


def test_its_cost_says_what_there_is_not(inference):
    case, native = inference.gate.bench_grid.cases()[0], inference.gate.implementation("native")
    call = Call(inference.technique, inference.gate, native, case, CPU)
    cost = call.with_starts(call.cost())
    assert cost.forward_peak >= 8 * 64 * 4  # at least its output
    assert cost.missing["training_peak"] == cost.missing["saved_for_backward"] == NO_GRADIENT
    told = {name for name in FIGURES if getattr(cost, name) is not None}
    assert told | set(cost.missing) == set(FIGURES)


def test_its_first_call_has_no_backward(site, inference):
    site.install_toy()
    case = inference.gate.bench_grid.cases()[0]
    stages = []
    assert overheads.first_call("toy", "gate", "native", case, CPU, stages.append) >= 0.0
    assert stages == ["first call", "second call"]


# The sigmoid of the toy has other bits at the end of a vector than within.
ROWS = [
    c.name
    for c in CAPABILITIES
    if not c.own_processes and c.name not in ("dynamic shapes", "CUDA graphs", "batch invariance")
]


@pytest.mark.parametrize("row", ROWS)
def test_every_row_of_the_support_table_knows(inference, row):
    """Only what a gradient is needed for is a no, and says that."""
    subject = Subject(Shared(inference.technique, CPU), inference.gate, inference.gate.implementation("native"))
    outcome = examine(subject, next(c for c in CAPABILITIES if c.name == row))
    if row in ("double backward", "selective checkpointing"):
        assert (outcome.answer, outcome.reason) == ("no", NO_GRADIENT)
    elif row == "FLOP counter":  # that of elementwise operators PyTorch does not have
        assert "0 operations are counted in the forward" in outcome.error
    elif row == "opcheck":
        assert (outcome.answer, outcome.reason) == ("no", "no operator")
    else:
        assert outcome.answer == "yes", outcome


def test_levels_of_a_public_function_are_exempt_from_what_needs_a_gradient(toy):
    operation = dataclasses.replace(
        toy.gate, function="toy:reference", levels=["reference", "native", "triton"], exemptions=INFERENCE,
    )  # fmt: skip
    for implementation in operation.implementations:
        assert implementation.unsupported["double backward"] == NO_GRADIENT
        assert implementation.unsupported["selective checkpointing"] == NO_GRADIENT


def test_only_the_kernels_of_the_forward_are_counted(inference, monkeypatch):
    watched = []

    @contextlib.contextmanager
    def watch(device):
        watched.append(device)
        yield ["kernel"]

    monkeypatch.setattr(launches, "watch_device", watch)
    case = inference.gate.test_grid.cases()[0]
    arguments = list(inference.gate.arguments(case, torch.Generator().manual_seed(0)))
    native = inference.gate.implementation("native")
    assert launches.judge_launches(inference.gate, native, case, arguments, [], CPU).passed
    assert watched == [CPU]


def test_recording_launches_asks_for_no_gradient(inference):
    pytest.importorskip("triton")
    from kernel_pytorch.harness.static.launches import record_launches

    case = inference.gate.test_grid.cases()[0]
    assert record_launches(inference.gate, "native", inference.native, case, bench=False) == []


def test_numbers_of_an_operation_with_lengths_are_not_made_to_record_it(toy):
    """Lengths are the real ones; memory for a cache of gigabytes is never touched."""
    pytest.importorskip("triton")
    from kernel_pytorch.harness.static.launches import record_launches

    seen = []

    def inputs(case, generator):
        cache = torch.randn(2**31, generator=generator, dtype=torch.float16)
        return (cache, torch.tensor([3, 4])), {"factor": 1.0}

    def function(x, weight, factor):
        seen.append((x.shape, weight.tolist()))
        return x[:1]

    operation = dataclasses.replace(toy.gate, inputs=inputs, exemptions=INFERENCE)
    try:
        record_launches(operation, "wide", function, toy.gate.test_grid.cases()[0], bench=False)
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        pytest.skip("this machine promises no more memory than it has")
    assert seen == [((2**31,), [3, 4])]


def test_checks_of_a_forward_alone(inference):
    x, weight = torch.randn(4, 16), torch.randn(16)
    check_deterministic(lambda x, w: inference.native(x, w, 1.5), (x, weight), backward=False)
    check_compiled_equals_eager(
        lambda x, w: torch.mul(x, w), (x, weight), dynamic=False, backward=False
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="no gradients"):
        check_deterministic(lambda x, w: inference.native(x, w, 1.5), (x, weight))


def test_a_vector_has_rows_where_it_is_data():
    x, lengths = torch.randn(4, 3), torch.arange(4)

    def function(x, lengths):
        assert lengths.shape == x.shape[:1]
        return x * lengths[:, None]

    check_rows_independent(function, (x, lengths), data=(True, True))
    with pytest.raises(AssertionError):
        check_rows_independent(function, (x, lengths))


# Features that a level lacks.


def lacking(level):
    return Exemption(("case.doubled",), "it has no factor", (level,))


def featured(toy, **changes):
    tests = (
        point("plain", core=True, rows=4, columns=16),
        point("doubled", reason="a feature", rows=4, columns=16, doubled=True),
    )
    given = {"test_grid": grid(*tests, dtypes=(torch.float32,)), "exemptions": [lacking("native")]}
    return dataclasses.replace(toy.gate, **(given | changes))


def test_a_level_is_not_verified_on_what_it_lacks(toy):
    operation = featured(toy)
    plain, doubled = operation.test_grid.cases()
    technique = dataclasses.replace(toy.technique, operations=[operation])
    native, compiled = (operation.implementation(name) for name in ("native", "compile"))
    found = verify_trial(technique, operation, native, Trial(doubled, RANDOM), CPU)
    assert found.unavailable == "doubled: it has no factor"
    assert verify_trial(technique, operation, native, Trial(plain, RANDOM), CPU).unavailable is None
    assert verify_trial(technique, operation, compiled, Trial(doubled, RANDOM), CPU).unavailable is None


def test_a_level_is_not_timed_on_what_it_lacks(toy, machine):
    cases = featured(toy).test_grid
    operation = featured(toy, bench_grid=cases)
    technique = dataclasses.replace(toy.technique, operations=[operation])
    native = [operation.implementation("native")]
    for case, reason in zip(cases, ("", "doubled: it has no factor"), strict=True):
        job = Job(technique, operation, case, Direction.FORWARD)
        refused = JobRun(job, machine, CPU, rounds=8).check(native, lambda stage: None)
        assert [m.reason for m in refused.values()] == ([reason] if reason else [])


def test_what_a_level_lacks_names_a_level_and_no_core_case(toy):
    with pytest.raises(ValueError, match="exemptions names fast; levels are reference, native, compile, cuda"):
        featured(toy, exemptions=[lacking("fast")])
    every = point("for all", core=True, rows=4, columns=16, doubled=True)
    with pytest.raises(ValueError, match=r"core case 'for all' has case\.doubled, from which a level is exempt"):
        featured(toy, test_grid=grid(every, dtypes=(torch.float32,)))


def test_on_a_gpu_determinism_is_asked_with_the_rows_of_the_case(inference, monkeypatch):
    """More rows are for the atomic additions of a backward, and an operation for inference may refuse them."""
    seen = []

    def few_rows(x, weight, factor):
        seen.append(len(x))
        if len(x) > 16:
            raise ValueError("x: at most 16 rows")
        return torch.mul(x, weight).sigmoid().mul(factor)

    monkeypatch.setattr(inference, "native", few_rows)
    make = subject_module.make_arguments
    monkeypatch.setattr(subject_module, "make_arguments", lambda o, trial, device, seed: make(o, trial, CPU, seed))
    asked = Subject(
        Shared(inference.technique, torch.device("cuda")), inference.gate, inference.gate.implementations[1]
    )
    row = next(c for c in CAPABILITIES if c.name == "determinism")
    assert examine(asked, row).answer == "yes"
    assert set(seen) == {4}
    with_gradients = dataclasses.replace(asked, operation=dataclasses.replace(inference.gate, exemptions=[]))
    seen.clear()
    examine(with_gradients, row)
    assert seen == [4 * 64]
