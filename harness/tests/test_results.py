"""The record survives the disk, refuses what it does not know, and is never written by halves."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_pytorch.harness import records as records_module
from kernel_pytorch.harness.clock import Verdict, compare_paired
from kernel_pytorch.harness.records import Identity, RecordError, write_atomically
from kernel_pytorch.harness.results import (
    CaseRecord,
    Interval,
    Measurement,
    Results,
    load,
)
from kernel_pytorch.harness.technique import Case

CASE = Case(
    "prefill", torch.bfloat16, {"shape": (2, 3, 64), "weight_dtype": torch.float32, "affine": True, "eps": 1e-6}
)


def measurement(samples=(1e-6, 2e-6)):
    return Measurement(
        operation="gate",
        case=CaseRecord.of(CASE),
        direction="forward",
        implementation="native",
        level="native",
        status="measured",
        seconds=Interval(median=1.5e-6, low=1e-6, high=2e-6),
        samples=samples,
        comparisons={"reference": compare_paired([1e-6] * 9, [2e-6] * 9)},
    )


@pytest.fixture
def results(machine):
    created = "2026-01-01T00:00:00+00:00"
    identities = {"gate/native": Identity(made_by="torch 2.13.0", sources={"native": "abc"})}
    return Results(
        technique="toy",
        created=created,
        quick=True,
        machine=machine,
        identities=identities,
        measurements=(measurement(),),
    )


def test_what_is_saved_is_what_is_loaded(results, tmp_path):
    path = tmp_path / "a" / "new" / "folder" / "toy.json"
    results.save(path)
    assert load(path) == results
    assert [file.name for file in path.parent.iterdir()] == ["toy.json"]
    assert path.stat().st_mode & 0o777 == 0o644


@given(st.lists(st.floats(1e-12, 1e3), max_size=20).map(tuple))
@settings(deadline=None)
def test_samples_are_kept_to_the_last_bit(samples):
    before = measurement(samples)
    assert Measurement.model_validate_json(before.model_dump_json()).samples == samples


def test_a_case_is_recorded_as_json_can_hold_it():
    record = CaseRecord.of(CASE)
    assert record.sizes == {"shape": [2, 3, 64], "weight_dtype": "float32", "affine": True, "eps": 1e-6}
    assert record.dtype == "bfloat16"
    assert record.label == "prefill 2x3x64 weight_dtype=float32 affine=True eps=1e-06 bfloat16"
    assert CaseRecord.model_validate_json(record.model_dump_json()) == record
    assert CaseRecord.of(Case("plain", torch.float32, {"rows": 3})).label == "plain rows=3 float32"
    assert CaseRecord.of(Case("nested", torch.float32, {"all": ((1, torch.half), None)})).sizes == {
        "all": [[1, "float16"], None]
    }


def test_a_comparison_keeps_its_verdict():
    record = measurement().comparisons["reference"]
    assert record.verdict is Verdict.SLOWER
    assert record.speedup.median == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema_version": 2}, "schema_version: Input should be 1"),
        ({"mood": "good"}, "mood: Extra inputs are not permitted"),
        ({"technique": None}, "technique: Input should be a valid string"),
    ],
)
def test_another_version_and_an_unknown_field_are_refused(results, tmp_path, change, complaint):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(json.loads(results.model_dump_json()) | change))
    with pytest.raises(RecordError) as refused:
        load(path)
    assert str(refused.value) == f"{path}: not a results file of schema version 1 ({complaint})"


def test_fields_that_are_no_longer_measured_are_dropped(results, tmp_path):
    content = json.loads(results.model_dump_json())
    content |= {"accuracy": [{"operation": "gate"}], "real_input": "hidden states", "sources": {}, "carried": {}}
    content["measurements"][0] |= {"burst": 1e-3, "sustained": None}
    (tmp_path / "old.json").write_text(json.dumps(content))
    assert load(tmp_path / "old.json") == results


def test_a_field_inside_a_measurement_is_named_with_its_place(results, tmp_path):
    path = tmp_path / "toy.json"
    path.write_text(results.model_dump_json().replace('"measured"', '"guessed"'))
    with pytest.raises(RecordError, match=r"\(measurements\.0\.status: Input should be 'measured', 'unavailable'"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00"])
def test_what_is_no_results_file_is_called_so(tmp_path, content):
    path = tmp_path / "toy.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=r"toy\.json: not a results file"):
        load(path)


def test_a_file_that_is_absent_is_named(tmp_path):
    with pytest.raises(RecordError, match=r"absent\.json: No such file or directory"):
        load(tmp_path / "absent.json")


class FullDisk:
    """A file on a disk that is full after three characters."""

    def __init__(self, handle, *arguments, **options):
        self._file = os.fdopen(handle, "w")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._file.close()

    def write(self, text):
        self._file.write(text[:3])
        raise OSError("no space left on device")


def fail(*arguments):
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["write", "fsync", "chmod", "replace"])
def test_a_crash_half_way_leaves_the_previous_file_whole_and_nothing_beside_it(results, tmp_path, monkeypatch, place):
    path = tmp_path / "toy.json"
    results.save(path)
    before = path.read_bytes()
    planted = {name: getattr(os, name) for name in ("fdopen", "fsync", "chmod", "replace", "unlink")}
    planted |= {"fdopen": FullDisk} if place == "write" else {place: fail}
    monkeypatch.setattr(records_module, "os", type("os", (), {k: staticmethod(v) for k, v in planted.items()}))
    with pytest.raises((OSError, KeyboardInterrupt)):
        results.model_copy(update={"technique": "another"}).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["toy.json"]


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "text"
    write_atomically(path, "old")
    seen = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (seen.append(path.read_text()), replace(*paths)))
    write_atomically(path, "new")
    assert seen == ["old"]
    assert path.read_text() == "new"


def saved(record, path, change):
    """A file that holds a record with one change to its JSON."""
    data = json.loads(record.model_dump_json())
    change(data)
    path.write_text(json.dumps(data))
    return path


def twice(data):
    data["measurements"] *= 2


IMPOSSIBLE = {
    "a negative time": (lambda data: data["measurements"][0]["seconds"].update(median=-1e-6), "seconds.median"),
    "a negative sample": (lambda data: data["measurements"][0].update(samples=[-1e-6]), "samples.0"),
    "a negative rate": (lambda data: data["machine"]["ceilings"]["bandwidth"][0].update(bytes_per_second=-1.0), "ceil"),
    "no number": (lambda data: data["measurements"][0]["seconds"].update(median=math.nan), "NaN is no number"),
    "an infinite number": (lambda data: data["measurements"][0].update(relative_error=math.inf), "Infinity is no"),
    "a row twice": (twice, "2 times the row"),
    "markup in a name": (lambda data: data["measurements"][0].update(operation="<b>gate"), "operation"),
    "markup of a terminal": (lambda data: data["measurements"][0]["case"].update(name="[red]a"), "case.name"),
    "a table in a device": (lambda data: data["machine"]["environment"].update(device_name="a | b"), "device_name"),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_record_that_cannot_be_is_refused_with_the_name_of_its_file(results, tmp_path, what):
    change, complaint = IMPOSSIBLE[what]
    path = saved(results, tmp_path / "toy.json", change)
    with pytest.raises(RecordError, match=rf"toy\.json: not a results file of schema version 1 \(.*{complaint}"):
        load(path)


def test_a_key_that_is_there_twice_is_refused(results, tmp_path):
    path = tmp_path / "toy.json"
    path.write_text(results.model_dump_json().replace('"technique"', '"technique":"toy","technique"'))
    with pytest.raises(RecordError, match="2 times the row technique"):
        load(path)


def test_a_file_that_is_older_than_identities_is_read(results, tmp_path):
    data = json.loads(results.model_dump_json(exclude={"identities"}))
    older = data | {"sources": {"gate/native": "abc"}, "kernels": {}, "carried": {"gate/native": {"commit": "c"}}}
    (tmp_path / "toy.json").write_text(json.dumps(older))
    assert load(tmp_path / "toy.json") == results.model_copy(update={"identities": {}})
