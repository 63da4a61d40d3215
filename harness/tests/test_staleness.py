"""What of results is out of date: defaults must be kernels that were measured or carried, the rest is listed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernel_pytorch.harness.results import Carried, CaseRecord, IntervalRecord, Measurement, Results, Run
from kernel_pytorch.harness.sources import kernels_digest, technique_digests
from kernel_pytorch.harness.staleness import Change, Stale, default_levels, listing, remedies, stale
from kernel_pytorch.harness.technique import Implementation, Level

PLACE = Path("results") / "made-up" / "toy.json"
DAY = "2026-01-02"


def measurement(implementation, status="measured", run=0):
    about = {"operation": "gate", "direction": "forward", "level": implementation.partition(":")[0]}
    case = CaseRecord(name="a", dtype="float32", sizes={})
    seconds = IntervalRecord(median=1e-6, low=1e-6, high=1e-6)
    return Measurement(**about, implementation=implementation, case=case, status=status, seconds=seconds, run=run)


@pytest.fixture
def results(toy, machine):
    """Of the present sources; `native` is a default that rests on them."""
    toy.defaults = (SimpleNamespace(level="native", record="made-up", functions=None),)
    return Results(
        technique="toy",
        created=f"{DAY}T03:04:05+00:00",
        quick=False,
        machine=machine,
        sources=technique_digests(toy.technique, "cpu"),
        kernels=technique_digests(toy.technique, "cpu", kernels_digest),
        measurements=(measurement("reference"), measurement("native")),
    )


def changed(results, names, **fields):
    """The same with another digest of `gate/native` in these tables."""
    return results.model_copy(update={name: getattr(results, name) | {"gate/native": "old"} for name in names} | fields)


def found(results, toy, place=PLACE):
    return {each.label: (each.change, each.fails) for each in stale(results, toy.technique, place)}


def test_what_is_of_the_present_sources_is_not_listed(results, toy):
    assert stale(results, toy.technique, PLACE) == []


def test_a_default_fails_by_the_digest_of_its_kernels(results, toy):
    assert found(changed(results, ["sources", "kernels"]), toy) == {"gate/native": (Change.KERNELS, True)}
    assert found(changed(results, ["kernels"]), toy) == {"gate/native": (Change.KERNELS, True)}
    assert found(changed(results, ["sources"]), toy) == {"gate/native": (Change.AROUND, False)}


def test_what_was_carried_does_not_fail(results, toy):
    # `report --carry` writes the digest of the present kernels, and the one of those that were measured beside it.
    carried = {"gate/native": Carried(kernels="old", commit="c" * 40, compared="the PTX")}
    assert found(changed(results, ["sources"], carried=carried), toy) == {"gate/native": (Change.AROUND, False)}


def test_changed_kernels_of_what_is_no_default_are_listed(results, toy):
    other = PLACE.parents[1] / "other" / "toy.json"  # the table names another record
    assert found(changed(results, ["sources", "kernels"]), toy, other) == {"gate/native": (Change.KERNELS, False)}


def test_a_record_without_digests_of_kernels_proves_nothing(results, toy):
    older = results.model_copy(update={"kernels": {}})
    assert found(older, toy) == {}
    assert found(changed(older, ["sources"]), toy) == {"gate/native": (Change.UNKNOWN, True)}


@pytest.mark.parametrize("left", [(), (measurement("native", "wrong"),)])
def test_a_default_that_was_not_measured_fails(results, toy, left):
    without = results.model_copy(update={"measurements": (measurement("reference"), *left)})
    assert found(without, toy) == {"gate/native": (Change.UNMEASURED, True)}


def test_a_default_whose_sources_are_missing_fails(results, toy):
    levels = [toy.gate.implementation("reference"), Implementation("native", Level.NATIVE, "no_such:native")]
    without = dataclasses.replace(toy.technique, operations=[dataclasses.replace(toy.gate, levels=levels)])
    assert [(each.change, each.fails) for each in stale(results, without, PLACE)] == [(Change.ABSENT, True)]


def test_what_is_no_longer_declared_is_listed_and_peers_are_not(results, toy):
    more = (measurement("lost"), measurement("peer:quick"))
    assert found(results.model_copy(update={"measurements": (*results.measurements, *more)}), toy) == {
        "gate/lost": (Change.GONE, False)
    }


def test_a_row_of_the_table_is_about_levels_that_a_function_has(results, toy):
    toy.defaults = (
        SimpleNamespace(level="triton", record="made-up", functions=None),  # the gate has none
        SimpleNamespace(level="cuda", record="made-up", functions=["gate"]),
        SimpleNamespace(level="native", record="made-up", functions=["other"]),
    )
    assert default_levels(toy.technique, "made-up") == {"gate/cuda"}


def test_the_date_is_that_of_the_run(results, toy):
    runs = tuple(
        Run(created=f"{day}T03:04:05+00:00", commit=None, dirty=None, torch="2.13.0", triton=None)
        for day in (DAY, "2026-02-03")
    )
    later = (measurement("reference"), measurement("native"), measurement("native", run=1))
    (each,) = stale(changed(results, ["sources"], runs=runs, measurements=later), toy.technique, PLACE)
    assert each.created[:10] == "2026-02-03"


def test_the_listing_fits_a_terminal_of_80_columns_and_what_fails_goes_first():
    levels = ("reference", "native", "torchscript", "compile", "triton", "triton (Gluon)", "cuda")
    many = [Stale(f"add_rms_norm_act/{level}", Change.UNKNOWN, DAY, level == "cuda") for level in levels]
    fine = [Stale("gate/native", Change.AROUND, DAY, default=True)]
    lines = listing({Path("results/a/fine.json"): fine, Path("results/a/many.json"): many, Path("c.json"): []})
    assert max(map(len, lines)) <= 80
    assert lines == [
        "results/a/many.json",
        f"  FAILS, default, {DAY}: sources changed, the record has no kernel digests",
        "    add_rms_norm_act: cuda",
        f"  listed, {DAY}: sources changed, the record has no kernel digests",
        "    add_rms_norm_act: reference, native, torchscript, compile, triton, triton",
        "      (Gluon)",
        "results/a/fine.json",
        f"  listed, {DAY}: only the code around the kernels changed",
        "    gate: native",
    ]


def test_remedies_are_commands_and_only_a_gpu_has_what_can_be_carried(results):
    environment = results.machine.environment.model_copy(update={"device_type": "cuda"})
    gpu = results.model_copy(update={"machine": results.machine.model_copy(update={"environment": environment})})
    files = {Path("results/cpu/toy.json"): results, Path("results/gpu/toy.json"): gpu}
    listed, failing = (Stale("gate/native", Change.KERNELS, DAY, default) for default in (False, True))
    assert remedies({file: [listed] for file in files}, files) == []
    assert remedies({file: [listed, failing] for file in files}, files) == [
        "",
        "2 defaults rest on kernels that were neither measured nor carried.",
        "Carry times of a GPU where the kernels compile to what was measured:",
        "  kernel-pytorch static toy --json results",
        "  kernel-pytorch report results/gpu/toy.json --carry",
        "Measure the others again, on the device that the record is named after:",
        "  on cpu: kernel-pytorch bench toy --full",
        "  on gpu: kernel-pytorch bench toy --full",
    ]
