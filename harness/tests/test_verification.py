"""Right levels pass, wrong ones are named, and all are given the same inputs."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch

from kernel_pytorch.harness.adversaries import ADVERSARIES
from kernel_pytorch.harness.technique import Exemption, Implementation, Level, grid, point
from kernel_pytorch.harness.trials import RANDOM, is_economical, make_arguments, trials
from kernel_pytorch.harness.verification import expect, verify, verify_trial

CPU = torch.device("cpu")
EVERY = len(ADVERSARIES) - 1  # a gate is not invariant to a common offset


def verified(technique, **options):
    """Verifications by level."""
    found = {}
    for verification in verify(technique, CPU, **options):
        found.setdefault(verification.implementation, []).append(verification)
    return found


def failures(found, level):
    return [line for verification in found[level] for line in verification.failures()]


def recording(function, calls):
    """The function, which remembers the arguments of its calls in less than float64."""

    @functools.wraps(function)
    def record(x, weight, factor):
        if x.dtype is not torch.float64:
            calls.append((x.detach().clone(), weight.detach().clone()))
        return function(x, weight, factor)

    return record


def test_right_levels_pass(toy):
    found = verified(toy.technique)
    assert set(found) == {"reference", "native", "compile", "cuda"}
    assert [line for level in found for line in failures(found, level)] == []
    assert max(v.worst for v in found["native"]) <= 1.0


def test_a_definition_must_give_the_results_that_are_known(toy):
    """Computed by hand, so that a wrong formula shows though all levels agree on it."""
    right = ([1.0, 2.0], [0.5, 0.0]), {"factor": 1.5}, [1.5 / (1.0 + math.exp(-0.5)), 0.75]

    def told(*known):
        gate = dataclasses.replace(toy.gate, known=known)
        found = verified(dataclasses.replace(toy.technique, operations=[gate]))
        assert failures(found, "native") == []
        return failures(found, "reference")

    assert told(right) == []
    (line,) = told(right, (*right[:2], [1.5 / (1.0 + math.exp(-0.5)), 0.75 + 1e-9]))
    assert line.startswith("toy gate level 'reference', case plain [rows=4 columns=16] float32: known result 2 ")
    assert "not close" in line
    (line,) = told((*right[:2], [0.75]))
    assert "known result 1 The values for attribute 'shape' do not match" in line
    (line,) = told(([1.0], {"factor": 1.5}, [0.75]))
    assert "known result 1 gate: known must return (args, kwargs) of toy:reference" in line


def test_of_a_mean_the_errors_of_its_terms_are_known(toy):
    """By the arguments that the operation names; of what is no mean nothing is run twice."""
    named = dataclasses.replace(toy.gate, averaged=lambda arguments: arguments | {"x": arguments["x"][:1]})
    trial = trials(toy.gate, CPU)[0]
    against = expect(named, trial, CPU)
    for found in (against.reference, against.truth):
        torch.testing.assert_close(found.terms[0], found.outputs[0][:1])
    assert against.truth.terms[0].dtype is torch.float64
    assert expect(toy.gate, trial, CPU).reference.terms == ()


def test_a_truth_that_does_not_fit_is_computed_in_parts(toy, monkeypatch):
    """The definition runs out of memory in float64 alone; without parts the error is the user's to see."""
    trial, definition, asked = trials(toy.gate, CPU)[0], toy.reference, []

    def too_large(x, weight, factor):
        if x.dtype is torch.float64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return definition(x, weight, factor)

    def by_row(**named):
        asked.append(named["x"].dtype)
        return torch.cat([definition(**{**named, "x": row}) for row in named["x"].split(1)])

    whole = expect(toy.gate, trial, CPU)
    monkeypatch.setattr(toy, "reference", too_large)
    with pytest.raises(torch.OutOfMemoryError):
        expect(toy.gate, trial, CPU)
    found = expect(dataclasses.replace(toy.gate, in_parts=by_row), trial, CPU)
    assert torch.float64 in asked
    torch.testing.assert_close(found.truth.quantities(), whole.truth.quantities())


def test_a_wrong_level_is_named_with_technique_operation_case_and_quantity(toy, monkeypatch):
    monkeypatch.setattr(toy, "native", lambda x, weight, factor: toy.reference(x, weight, factor) * 1.01)
    found = verified(toy.technique)
    assert not any(v.passed for v in found["native"])
    first = failures(found, "native")[0]
    assert first.startswith("toy gate level 'native', case plain [rows=4 columns=16] float32: output is off by")
    quantities = {line.partition("float32: ")[2].partition(" is off")[0] for line in failures(found, "native")[:3]}
    assert quantities == {"output", "gradient of x", "gradient of weight"}
    assert failures(found, "reference") == failures(found, "compile") == []


def test_a_level_that_is_wrong_on_one_layout_alone_is_named_with_it(toy, monkeypatch):
    def blind_to_strides(x, weight, factor):
        return toy.reference(x.as_strided(x.shape, (x.shape[1], 1)), weight, factor)

    monkeypatch.setattr(toy, "native", blind_to_strides)
    wrong = {v.trial.adversary for v in verified(toy.technique, levels=["native"])["native"] if not v.passed}
    assert wrong == {"strided view", "packed view"}


def test_a_level_that_raises_is_wrong_and_the_others_go_on(toy, monkeypatch):
    def raising(x, weight, factor):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(toy, "native", raising)
    found = verified(toy.technique)
    assert all("call raised ZeroDivisionError: planted" in line for line in failures(found, "native"))
    assert len(failures(found, "native")) == len(found["native"]) == len(found["reference"])
    assert failures(found, "compile") == []


def test_what_is_unavailable_is_no_failure_and_says_why(toy):
    found = verified(toy.technique, levels=["cuda"])
    assert list(found) == ["cuda"]
    for verification in found["cuda"]:
        assert verification.passed
        assert verification.unavailable == "the toy has no kernel"
        assert verification.error_checks == ()
        assert verification.worst == 0.0


def test_a_peer_that_is_not_installed_is_unavailable(toy):
    peer = Implementation("peer:nobody", Level.PEER, "a_library_that_nobody_has:function")
    operation = dataclasses.replace(toy.gate, levels=[toy.gate.reference, peer])
    found = verified(dataclasses.replace(toy.technique, operations=[operation]), levels=["peer:nobody"])
    reasons = {v.unavailable for v in found["peer:nobody"]}
    assert reasons == {"ModuleNotFoundError: No module named 'a_library_that_nobody_has'"}


def test_every_implementation_is_given_the_same_inputs(toy, monkeypatch):
    seen = {"reference": [], "native": []}
    for level, calls in seen.items():
        monkeypatch.setattr(toy, level, recording(getattr(toy, level), calls))
    count = len(verified(toy.technique, levels=["native"])["native"])
    # The reference runs twice: for the shape of the incoming gradients, and with them.
    assert len(seen["reference"]) == 2 * count
    for ours, theirs in zip(seen["native"], seen["reference"][::2], strict=True):
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(ours, theirs, strict=True))


def test_inputs_are_the_same_again_and_differ_between_trials_and_seeds(toy):
    every = trials(toy.gate, CPU)
    first, second, planted = every[0], every[1], every[-1]
    x = make_arguments(toy.gate, first, CPU)[0]
    assert torch.equal(x, make_arguments(toy.gate, first, CPU)[0])
    assert not torch.equal(x, make_arguments(toy.gate, first, CPU, seed=1)[0])
    assert first.case.dtype != second.case.dtype
    assert not torch.allclose(x, make_arguments(toy.gate, second, CPU)[0].float(), atol=1e-2)
    assert planted.adversary != RANDOM
    assert not torch.equal(make_arguments(toy.gate, planted, CPU)[1], make_arguments(toy.gate, second, CPU)[1])


def test_adversaries_are_planted_in_the_data_alone(toy):
    zeros = next(t for t in trials(toy.gate, CPU) if t.adversary == "zero rows")
    x, weight, factor = make_arguments(toy.gate, zeros, CPU)
    assert not x[::2].any()
    assert weight.all()
    assert factor == 1.5


def test_an_argument_that_does_not_exist_cannot_be_adversarial(toy):
    operation = dataclasses.replace(toy.gate, roles={"data": ("z",)})
    with pytest.raises(ValueError, match="gate: adversarial names 'z'; arguments are x, weight, factor"):
        make_arguments(operation, trials(operation, CPU)[-1], CPU)


def test_trials_are_every_case_and_every_adversary_on_one_core_case_per_dtype(toy):
    labels = [trial.label for trial in trials(toy.gate, CPU)]
    assert len(set(labels)) == len(labels) == 4 + 2 * EVERY
    assert labels[0] == "plain [rows=4 columns=16] float32"
    assert labels[4] == f"plain [rows=4 columns=16] float32, {next(iter(ADVERSARIES))}"
    assert len(trials(dataclasses.replace(toy.gate, roles={}), CPU)) == 4


def test_what_is_exempt_is_left_as_it_is_in_its_dtypes_and_the_rest_is_not(toy):
    exemption = Exemption(("zero rows", "denormals"), "a good one", arguments=("x",), dtypes=(torch.float16,))
    operation = dataclasses.replace(toy.gate, roles={"data": ("x", "weight")}, exemptions=[exemption])
    zeros = {
        t.case.dtype: make_arguments(operation, t, CPU) for t in trials(operation, CPU) if t.adversary == "zero rows"
    }
    for dtype, rows_are_zero in ((torch.float32, True), (torch.float16, False)):
        x, weight, _ = zeros[dtype]
        assert x[::2].any() != rows_are_zero
        assert not weight[::2].any()
    assert len(trials(operation, CPU)) == 4 + 2 * EVERY


def test_an_adversary_from_which_every_argument_is_exempt_is_no_trial(toy):
    exemption = Exemption(("zero rows", "denormals"), "a good one", arguments=("x",), dtypes=(torch.float16,))
    asked = {(t.case.dtype, t.adversary) for t in trials(dataclasses.replace(toy.gate, exemptions=[exemption]), CPU)}
    missing = {(t.case.dtype, t.adversary) for t in trials(toy.gate, CPU)} - asked
    assert missing == {(torch.float16, "zero rows"), (torch.float16, "denormals")}


def test_a_fault_that_one_adversary_shows_is_missed_only_where_that_is_exempt(toy, monkeypatch):
    def wrong_where_it_is_large(x, weight, factor):
        return toy.reference(x, weight, factor) * torch.where((x.abs() > 1000) & x.isfinite(), 1.01, 1.0).to(x.dtype)

    monkeypatch.setattr(toy, "native", wrong_where_it_is_large)
    large = ("outlier channels", "large mean")
    exemption = Exemption(large, "a good one", arguments=("x",))
    for given, expected in (((), set(large)), ((exemption,), set())):
        operation = dataclasses.replace(toy.gate, exemptions=given)
        found = verified(dataclasses.replace(toy.technique, operations=[operation]), levels=["native"])["native"]
        assert {v.trial.adversary for v in found if not v.passed} == expected


@pytest.mark.parametrize(("error", "right"), [(1.9e-3, True), (2.1e-3, False)])
def test_a_level_may_be_checked_against_the_error_of_another_instead(toy, monkeypatch, error, right):
    def off_by(error):
        return lambda x, weight, factor: toy.reference(x, weight, factor) * (1.0 + error)

    monkeypatch.setattr(toy, "native", off_by(1e-3))
    monkeypatch.setattr(toy, "ours", off_by(error), raising=False)
    ours = Implementation("ours", Level.NATIVE, toy.gate.reference.target.replace("reference", "ours"), 4.0, "a test")
    exemption = Exemption(("zero rows",), "a good one", ("ours",), dtypes=(torch.float32,), instead="native")
    assert str(exemption) == "zero rows in float32 at ours (checked against native instead): a good one"
    operation = dataclasses.replace(toy.gate, levels=[*toy.gate.levels, ours], exemptions=[exemption])
    found = verified(dataclasses.replace(toy.technique, operations=[operation]), levels=["ours"])["ours"]
    asked = [v for v in found if v.trial.adversary == "zero rows" and v.trial.case.dtype == torch.float32]
    assert [(v.passed, v.unavailable) for v in asked] == [(right, None)]
    assert not any(v.passed for v in found if v.trial.adversary == RANDOM and v.trial.case.dtype == torch.float32)


def test_a_level_alone_may_be_exempt_and_says_why(toy, monkeypatch):
    """Of PyTorch's own operators; the trial stays, and the other levels are held against it."""
    monkeypatch.setattr(toy, "native", lambda x, weight, factor: toy.reference(x.nan_to_num(), weight, factor))
    exemption = Exemption(("NaN", "infinities"), "a good one", ("native",), dtypes=(torch.float32,))
    assert str(exemption) == "NaN, infinities in float32 at native: a good one"
    operation = dataclasses.replace(toy.gate, exemptions=[exemption])
    assert len(trials(operation, CPU)) == len(trials(toy.gate, CPU))
    found = verified(dataclasses.replace(toy.technique, operations=[operation]))
    assert {(v.trial.case.dtype, v.trial.adversary) for v in found["native"] if v.unavailable} == {
        (torch.float32, "NaN"), (torch.float32, "infinities"),
    }  # fmt: skip
    assert {v.unavailable for v in found["native"]} == {None, "a good one"}
    assert {(v.trial.case.dtype, v.trial.adversary) for v in found["native"] if not v.passed} == {
        (torch.float16, "NaN"), (torch.float16, "infinities"),
    }  # fmt: skip
    assert all(v.unavailable is None and v.passed for v in found["reference"])


def test_what_compiles_for_every_shape_keeps_to_core_cases_unless_told(toy):
    every = trials(toy.gate, CPU)
    core = [trial for trial in every if trial.case.core]
    assert 0 < len(core) < len(every)
    assert [v.trial for v in verified(toy.technique, levels=["compile"])["compile"]] == core
    assert [v.trial for v in verified(toy.technique, levels=["compile"], exhaustive=True)["compile"]] == every
    native, compiled = toy.gate.implementation("native"), toy.gate.implementation("compile")
    assert all(is_economical(native, trial) for trial in every)
    assert [trial for trial in every if is_economical(compiled, trial)] == core


def test_more_shapes_than_torch_compile_remembers_are_no_failure(toy):
    points = [point(f"{n} rows", core=True, rows=n, columns=3) for n in range(1, 12)]
    operation = dataclasses.replace(toy.gate, test_grid=grid(*points, dtypes=[torch.float32]), roles={})
    found = verified(dataclasses.replace(toy.technique, operations=[operation]), levels=["compile"])
    assert failures(found, "compile") == []
    assert len(found["compile"]) == len(points)


@pytest.mark.parametrize("always", [False, True])
def test_a_miss_counts_only_if_fresh_inputs_miss_too(toy, monkeypatch, always):
    trial = next(t for t in trials(toy.gate, CPU) if t.case.core)
    first = expect(toy.gate, trial, CPU).arguments[0]

    def unlucky(x, weight, factor):
        return toy.reference(x, weight, factor) * (1.00001 if always or torch.equal(x, first) else 1.0)

    monkeypatch.setattr(toy, "native", unlucky)
    found = verify_trial(toy.technique, toy.gate, toy.gate.implementation("native"), trial, CPU)
    assert found.passed is not always, found.failures()
