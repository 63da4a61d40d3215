"""Activations join what is verified: an imitation everywhere, those of a real network where there are some."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_pytorch.harness import trials as trials_module
from kernel_pytorch.harness.real_input import ACTIVATIONS_VARIABLE, TOKENS, has_real_activations, imitated_activations
from kernel_pytorch.harness.trials import IMITATED, REAL, make_arguments, trials
from kernel_pytorch.harness.verification import verify

CPU = torch.device("cpu")


def gate_of_activations(activations, dtype):
    return (activations.to(dtype), torch.full(activations.shape[-1:], 0.1).to(dtype), 1.5), {}


@pytest.fixture
def operation(toy, monkeypatch):
    monkeypatch.setattr(trials_module, "has_real_activations", lambda: False)
    return dataclasses.replace(toy.gate, real_input=gate_of_activations, roles={})


def failures(toy, operation):
    found = verify(dataclasses.replace(toy.technique, operations=[operation]), CPU, levels=["native"])
    return {v.trial.adversary: [j.quantity for j in v.judgements if not j.passed] for v in found if not v.passed}


def test_the_imitation_has_the_channels_of_a_trained_network():
    x = imitated_activations()
    assert x.shape == (TOKENS, 384)
    assert torch.equal(x, imitated_activations())
    assert not torch.equal(x, imitated_activations(1))
    deviations = x.std(0).sort().values
    assert deviations[-1] > 20 * deviations[192]
    assert x.mean(0).abs().max() > 20 * x.mean(0).abs().median()
    assert x.abs().max() > 20 * x.abs().median()


def test_activations_are_tried_in_every_dtype_where_they_mean_something(toy, operation, monkeypatch):
    kinds = {(t.adversary, t.case.dtype) for t in trials(operation, CPU)}
    assert {(IMITATED, torch.float32), (IMITATED, torch.float16)} < kinds
    assert REAL not in {kind for kind, _ in kinds}
    assert not {IMITATED, REAL} & {t.adversary for t in trials(toy.gate, CPU)}
    monkeypatch.setattr(trials_module, "has_real_activations", lambda: True)
    assert [t.adversary for t in trials(operation, CPU)][-4:] == [IMITATED] * 2 + [REAL] * 2


def test_real_activations_are_those_of_the_file(operation, monkeypatch, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="reading the file needs safetensors")
    stored = torch.randn(TOKENS, 384)
    safetensors.save_file({"activations": stored}, tmp_path / "activations.safetensors")
    monkeypatch.setattr(trials_module, "has_real_activations", has_real_activations)
    monkeypatch.setenv(ACTIVATIONS_VARIABLE, str(tmp_path / "activations.safetensors"))
    real = next(t for t in trials(operation, CPU) if t.adversary == REAL and t.case.dtype == torch.float16)
    assert torch.equal(make_arguments(operation, real, CPU)[0], stored.half())


def test_a_fault_of_outlying_channels_is_found(toy, operation, monkeypatch):
    def wrong_where_it_is_large(x, weight, factor):
        return toy.reference(x, weight, factor) * torch.where(x.abs() > 20, 1.01, 1.0).to(x.dtype)

    monkeypatch.setattr(toy, "native", wrong_where_it_is_large)
    assert set(failures(toy, operation)) == {IMITATED}


def test_a_miss_that_fresh_gradients_do_not_confirm_is_luck(toy, operation, monkeypatch):
    calls = []

    def wrong_at_first(x, weight, factor):
        calls.append(len(x))
        y = torch.sigmoid(x * weight) * factor
        return y * 1.01 if calls.count(TOKENS) == 1 and len(x) == TOKENS else y

    monkeypatch.setattr(toy, "native", wrong_at_first)
    assert failures(toy, operation) == {}

    monkeypatch.setattr(toy, "native", lambda x, weight, factor: torch.sigmoid(x * weight) * factor * 1.01)
    assert IMITATED in failures(toy, operation)
