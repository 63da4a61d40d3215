"""Imitated activations are verified, with the outlying channels of a trained network."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_pytorch.harness.adversaries import IMITATED, TOKENS, imitated_activations
from kernel_pytorch.harness.trials import trials
from kernel_pytorch.harness.verification import verify

CPU = torch.device("cpu")


def gate_of_activations(activations, dtype):
    return (activations.to(dtype), torch.full(activations.shape[-1:], 0.1).to(dtype), 1.5), {}


@pytest.fixture
def operation(toy):
    return dataclasses.replace(toy.gate, real_input=gate_of_activations, roles={})


def failures(toy, operation):
    found = verify(dataclasses.replace(toy.technique, operations=[operation]), CPU, levels=["native"])
    return {v.trial.adversary: [j.quantity for j in v.error_checks if not j.passed] for v in found if not v.passed}


def test_the_imitation_has_the_channels_of_a_trained_network():
    x = imitated_activations()
    assert x.shape == (TOKENS, 384)
    assert torch.equal(x, imitated_activations())
    assert not torch.equal(x, imitated_activations(1))
    deviations = x.std(0).sort().values
    assert deviations[-1] > 20 * deviations[192]
    assert x.mean(0).abs().max() > 20 * x.mean(0).abs().median()
    assert x.abs().max() > 20 * x.abs().median()


def test_activations_are_tried_in_every_dtype_where_they_mean_something(toy, operation):
    kinds = {(t.adversary, t.case.dtype) for t in trials(operation, CPU)}
    assert {(IMITATED, torch.float32), (IMITATED, torch.float16)} < kinds
    assert IMITATED not in {t.adversary for t in trials(toy.gate, CPU)}


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
