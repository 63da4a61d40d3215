"""What of results is out of date: defaults must be code that was measured, the rest is listed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernel_pytorch.harness.models.record import Record
from kernel_pytorch.harness.models.record import Run as ModelRun
from kernel_pytorch.harness.provenance import fingerprint, identify
from kernel_pytorch.harness.records import Identity
from kernel_pytorch.harness.results import BenchmarkRun, CaseRecord, Interval, Measurement, Results
from kernel_pytorch.harness.staleness import (
    Change,
    Stale,
    default_levels,
    listing,
    remedies,
    stale,
    stale_models,
)
from kernel_pytorch.harness.technique import Implementation, Level

PLACE = Path("results") / "made-up" / "toy.json"
DAY = "2026-01-02"


def measurement(implementation, status="measured", run=0):
    about = {"operation": "gate", "direction": "forward", "level": implementation.partition(":")[0]}
    case = CaseRecord(name="a", dtype="float32", sizes={})
    seconds = Interval(median=1e-6, low=1e-6, high=1e-6)
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
        identities=identify(toy.technique, machine.environment),
        measurements=(measurement("reference"), measurement("native")),
    )


def changed(results, **facts):
    """The same with another identity of `gate/native`."""
    other = results.identities["gate/native"].model_copy(update=facts or {"sources": {"toy": "old"}})
    return results.model_copy(update={"identities": results.identities | {"gate/native": other}})


def found(results, toy, place=PLACE):
    return {each.label: (each.change, each.fails) for each in stale(results, toy.technique, place, identify)}


def test_what_is_of_the_present_code_is_not_listed(results, toy):
    assert found(results, toy) == {}


def test_a_default_fails_where_its_code_has_changed(results, toy):
    assert found(changed(results), toy) == {"gate/native": (Change.CODE, True)}


def test_a_default_fails_where_what_it_launches_has_changed(results, toy):
    """As Triton's kernels do: only the digest of a case that both sides know says so."""
    then, now = (Identity(made_by="Triton 3.7.1", kernels={"a": code, f"only {code}": "1"}) for code in ("1", "2"))
    measured = results.model_copy(update={"identities": {"gate/native": then}})

    def judged(now):
        (each,) = [s for s in stale(measured, toy.technique, PLACE, lambda *_: {"gate/native": now}) if s.default] or [
            None
        ]
        return each and (each.change, each.fails)

    assert judged(now) == (Change.CODE, True)
    assert judged(then.model_copy(update={"kernels": {"a": "1", "new": "3"}})) is None
    assert judged(now.model_copy(update={"made_by": "Triton 3.8.0"})) == (Change.MAKER, False)


def test_the_same_code_under_another_torch_is_listed(results, toy):
    assert found(changed(results, made_by="torch 1.0.0"), toy) == {"gate/native": (Change.MAKER, False)}


def test_changed_code_of_what_is_no_default_is_listed(results, toy):
    other = PLACE.parents[1] / "other" / "toy.json"  # the table names another record
    assert found(changed(results), toy, other) == {"gate/native": (Change.CODE, False)}


def test_a_record_that_is_older_than_identities_is_listed(results, toy):
    older = results.model_copy(update={"identities": {}})
    assert set(found(older, toy).values()) == {(Change.BEFORE, False)}


@pytest.mark.parametrize("left", [(), (measurement("native", "wrong"),)])
def test_a_default_that_was_not_measured_fails(results, toy, left):
    without = results.model_copy(update={"measurements": (measurement("reference"), *left)})
    assert found(without, toy) == {"gate/native": (Change.UNMEASURED, True)}


def test_a_default_whose_code_is_missing_fails(results, toy):
    levels = [toy.gate.implementation("reference"), Implementation("native", Level.NATIVE, "no_such:native")]
    without = dataclasses.replace(toy.technique, operations=[dataclasses.replace(toy.gate, levels=levels)])
    assert [(each.change, each.fails) for each in stale(results, without, PLACE, identify)] == [(Change.ABSENT, True)]


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
        BenchmarkRun(created=f"{day}T03:04:05+00:00", commit=None, dirty=None, torch="2.13.0", triton=None)
        for day in (DAY, "2026-02-03")
    )
    later = (measurement("reference"), measurement("native"), measurement("native", run=1))
    again = changed(results).model_copy(update={"runs": runs, "measurements": later})
    (each,) = stale(again, toy.technique, PLACE, identify)
    assert each.created[:10] == "2026-02-03"


@pytest.fixture
def models(machine, toy):
    """A record of two models, the first of the present code, the second older than identities."""
    about = {
        "date": DAY,
        "environment": machine.environment,
        "tiny": True,
        "transformers": "5",
        "packages": ("toy",),
        "rows": (),
    }
    now = fingerprint(identify(toy.technique, machine.environment))
    return Record(runs={"a/training": ModelRun(**about, identities={"toy": now}), "b/training": ModelRun(**about)})


def test_models_are_listed_where_what_was_patched_in_has_changed(models, toy, monkeypatch):
    old = Stale("b/training", Change.BEFORE, DAY)
    assert stale_models(models, [toy.technique], identify) == [old]
    assert stale_models(models, [], identify) == [Stale("a/training/toy", Change.ABSENT, DAY), old]
    other = lambda *_: {"gate/native": Identity(made_by="torch 2.13.0", sources={"toy": "changed"})}  # noqa: E731
    assert stale_models(models, [toy.technique], other) == [Stale("a/training/toy", Change.CODE, DAY), old]


@pytest.mark.parametrize("then", ["3.7.1", "3.7.1+build"])
@pytest.mark.parametrize(("here", "change"), [("3.7.1", Change.CODE), ("3.6.0", Change.MAKER)])
def test_another_compiler_is_no_change_of_the_code_of_models(models, toy, here, change, then):
    run = models.runs["a/training"]
    run = run.model_copy(update={"environment": run.environment.model_copy(update={"triton": then})})
    record = models.model_copy(update={"runs": {"a/training": run}})
    compiled = lambda *_: {"gate/triton": Identity(made_by=f"Triton {here}", kernels={"case": "digest"})}  # noqa: E731
    assert stale_models(record, [toy.technique], compiled) == [Stale("a/training/toy", change, DAY)]


def test_the_listing_fits_a_terminal_of_80_columns_and_what_fails_goes_first():
    levels = ("reference", "native", "torchscript", "compile", "triton", "triton (Gluon)", "cuda")
    many = [Stale(f"add_rms_norm_act/{level}", Change.CODE, DAY, level == "cuda") for level in levels]
    fine = [Stale(f"gate/{level}", Change.BEFORE, DAY, default=True) for level in levels]
    lines = listing({Path("results/a/fine.json"): fine, Path("results/a/many.json"): many, Path("c.json"): []})
    assert max(map(len, lines)) <= 80
    assert lines == [
        "results/a/many.json",
        f"  FAILS, default, {DAY}: the code has changed",
        "    add_rms_norm_act: cuda",
        f"  listed, {DAY}: the code has changed",
        "    add_rms_norm_act: reference, native, torchscript, compile, triton, triton",
        "      (Gluon)",
        "results/a/fine.json",
        f"  listed, {DAY}: measured before records named the code that ran",
    ]


def test_remedies_are_commands():
    files = [Path("results/cpu/toy.json"), Path("results/gpu/toy.json")]
    listed, failing = (Stale("gate/native", Change.CODE, DAY, default) for default in (False, True))
    assert remedies({file: [listed] for file in files}) == []
    assert remedies({file: [listed, failing] for file in files}) == [
        "",
        "2 defaults rest on code that was not measured. Measure it again, on the device of the record:",
        "  on cpu: kernel-pytorch bench toy --full",
        "  on gpu: kernel-pytorch bench toy --full",
    ]
