"""Planted faults: `kernel-pytorch verify` must turn red on each, naming level, case and quantity."""

import contextlib
import dataclasses
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

from kernel_pytorch.harness import cli, discovery
from kernel_pytorch.harness.commands import verify as verify_module
from kernel_pytorch.harness.technique import Implementation, Level
from kernel_pytorch.rmsnorm import reference
from kernel_pytorch.rmsnorm.technique import technique


def missing_weight(x, weight, eps, offset, casting):
    y = reference.rms_norm(x, None, eps, offset, casting)
    return y if weight is None else y.to(reference.rms_norm(x, weight, eps, offset, casting).dtype) + 0 * weight


def last_column_skipped(x, weight, eps, offset, casting):
    y = reference.rms_norm(x, weight, eps, offset, casting)
    return torch.cat([y[..., :-1], torch.zeros_like(y[..., -1:])], -1)


def eps_too_large(x, weight, eps, offset, casting):
    return reference.rms_norm(x, weight, 10 * eps, offset, casting)


def divisor_one_less(x, weight, eps, offset, casting):
    columns = x.shape[-1]
    return reference.rms_norm(x, weight, eps, offset, casting) * max(1, columns - 1) ** 0.5 / columns**0.5


def not_a_number(x, weight, eps, offset, casting):
    y = reference.rms_norm(x, weight, eps, offset, casting)
    return y.masked_fill(torch.arange(y.shape[-1]) == y.shape[-1] // 2, float("nan"))


def one_percent_too_large(x, weight, eps, offset, casting):
    return reference.rms_norm(x, weight, eps, offset, casting) * 1.01


def weight_gradient_dropped(x, weight, eps, offset, casting):
    return reference.rms_norm(x, None if weight is None else weight.detach(), eps, offset, casting)


class _WriteIncoming(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        before = dy.clone()
        dy.mul_(0.5)
        return before


def incoming_gradient_written(x, weight, eps, offset, casting):
    return _WriteIncoming.apply(reference.rms_norm(x, weight, eps, offset, casting))


PLANTS = {
    missing_weight: "output is off by",
    last_column_skipped: "output is off by",
    eps_too_large: "output is off by",
    divisor_one_less: "output is off by",
    not_a_number: "NaN or infinite",
    one_percent_too_large: "output is off by",
    weight_gradient_dropped: "gradient of weight is missing",
    incoming_gradient_written: "gradient of output 0 was written into",
}


@pytest.fixture
def verify_planted(monkeypatch):
    """Run the command on a copy of the technique in which one function stands at the native level."""

    def run(function):
        module = types.ModuleType("planted_rmsnorm")
        module.rms_norm = function
        monkeypatch.setitem(sys.modules, "planted_rmsnorm", module)
        planted = Implementation("native", Level.NATIVE, "planted_rmsnorm:rms_norm")
        operation = technique.operation("rms_norm")
        operation = dataclasses.replace(operation, implementations=[operation.reference, planted])
        copy = dataclasses.replace(technique, operations=[operation])
        # In this process: another one would find the technique that is installed, not the copy.
        monkeypatch.setattr(verify_module, "Workers", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(verify_module, "discover", lambda: discovery.Discovery({"rmsnorm": copy}, {}))
        return CliRunner().invoke(cli.app, ["verify", "rmsnorm", "--device", "cpu"], env={"COLUMNS": "200"})

    return run


def test_unchanged_copy_is_green(verify_planted):
    result = verify_planted(reference.rms_norm)
    assert result.exit_code == 0, result.output
    assert "wrong" not in result.output


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_plant_is_found(verify_planted, plant):
    result = verify_planted(plant)
    assert result.exit_code == 1, result.output
    named = [line for line in result.output.splitlines() if line.startswith("wrong:")]
    assert any("rms_norm level 'native'" in line and "case " in line and PLANTS[plant] in line for line in named), named
