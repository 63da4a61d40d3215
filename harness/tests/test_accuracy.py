"""Errors on given activations: of every level and dtype, beside the reference's, and no figure where there is none."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_pytorch.harness import accuracy, trials
from kernel_pytorch.harness.real_input import RealInputUnavailable
from kernel_pytorch.harness.report import accuracy_rows
from kernel_pytorch.harness.results import Results

CPU = torch.device("cpu")


@pytest.fixture
def measure(toy, monkeypatch):
    """Measure the toy on made-up activations."""
    for module in (accuracy, trials):
        monkeypatch.setattr(module, "real_activations", lambda tokens: torch.linspace(-2, 2, 4 * 8).view(4, 8))
    monkeypatch.setattr(trials, "TOKENS", 4)

    def real_input(activations, dtype):
        return (activations.to(dtype), torch.ones(8, dtype=dtype)), {"factor": 2.0}

    operation = dataclasses.replace(toy.gate, real_input=real_input)
    technique = dataclasses.replace(toy.technique, operations=[operation])
    return lambda wanted=None: accuracy.measure_accuracy(technique, CPU, wanted)


def test_every_level_dtype_and_quantity_has_its_error(measure):
    found, what = measure({"reference", "native"})
    assert what.startswith("4 x 8 hidden states")
    assert {(a.implementation, a.dtype, a.quantity) for a in found} == {
        (level, dtype, quantity)
        for level in ("reference", "native")
        for dtype in ("float32", "float16", "bfloat16")
        for quantity in ("output", "gradient of x", "gradient of weight")
    }
    assert all(a.relative_error == a.reference_error and a.reason == "" for a in found)
    errors = {a.dtype: a.relative_error for a in found if a.quantity == "output"}
    assert 0.0 < errors["float32"] < errors["float16"] < errors["bfloat16"] < 1e-2


def test_without_activations_there_is_a_reason(measure, monkeypatch):
    def absent(tokens):
        raise RealInputUnavailable("no network in these tests")

    monkeypatch.setattr(accuracy, "real_activations", absent)
    assert measure() == ((), "not measured here: no network in these tests")


def test_what_cannot_run_says_why(measure):
    found, _ = measure({"cuda"})
    assert [(a.dtype, a.quantity, a.reason, a.relative_error) for a in found] == [
        (dtype, "", "the toy has no kernel", None) for dtype in ("float32", "float16", "bfloat16")
    ]


def test_nan_has_no_error_and_is_called_wrong(measure, toy, monkeypatch, machine):
    monkeypatch.setattr(toy, "native", lambda x, weight, factor: toy.reference(x, weight, factor) * float("nan"))
    found, _ = measure({"native"})
    assert all(a.relative_error is None and a.error_over_budget is None for a in found)
    assert found[0].reason == "has 32 NaN or infinite elements where the truth is finite"


def test_a_level_that_is_wrong_keeps_its_error(measure, toy, monkeypatch):
    monkeypatch.setattr(toy, "native", lambda x, weight, factor: toy.reference(x, weight, factor) * 1.5)
    first = measure({"native"})[0][0]
    assert first.relative_error == pytest.approx(0.5)
    assert first.error_over_budget > 1.0
    assert first.reason.startswith("is off by")


def test_the_table_has_one_row_for_each_level_and_dtype(measure, toy, monkeypatch, machine):
    monkeypatch.setattr(toy, "native", lambda x, weight, factor: toy.reference(x, weight, factor) * float("nan"))
    found, what = measure()
    about = {"technique": "toy", "created": "", "quick": True, "machine": machine, "sources": {}, "measurements": ()}
    rows = {tuple(row[:3]): row[3:] for row in accuracy_rows(Results(**about, accuracy=found, real_input=what))}
    assert len(rows) == 4 * 3
    assert rows["gate", "cuda", "float32"][0] == "not measured here"
    assert rows["gate", "native", "float32"] == ["wrong", "", "", "", ""]
    output, reference, gradient, reference_gradient, share = rows["gate", "reference", "float32"]
    assert output == reference != ""
    assert gradient == reference_gradient != ""
    assert share.endswith("%")
