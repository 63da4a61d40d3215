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
from kernel_pytorch.my_technique import reference
from kernel_pytorch.my_technique.technique import technique

OPERATION = technique.operations[0]
right = getattr(reference, OPERATION.name)


def one_percent_too_large(x, beta):
    return right(x, beta) * 1.01


def beta_ignored(x, beta):
    return right(x, 1.0)


def last_element_skipped(x, beta):
    y = right(x, beta)
    return torch.cat([y[..., :-1], torch.zeros_like(y[..., -1:])], -1)


def not_a_number(x, beta):
    y = right(x, beta)
    return y.masked_fill(torch.arange(y.shape[-1]) == y.shape[-1] // 2, float("nan"))


def gradient_too_small(x, beta):
    y = right(x, beta)
    return y.detach() + 0.99 * (y - y.detach())


def gradient_dropped(x, beta):
    return right(x.detach(), beta) + 0 * x.detach().requires_grad_()


PLANTS = {
    one_percent_too_large: "output is off by",
    beta_ignored: "output is off by",
    last_element_skipped: "output is off by",
    not_a_number: "NaN or infinite",
    gradient_too_small: "gradient of x is off by",
    gradient_dropped: "gradient of x is missing",
}


@pytest.fixture
def verify_planted(monkeypatch):
    """Run the command on a copy of the technique in which one function stands at the native level."""

    def run(function):
        module = types.ModuleType("planted")
        module.function = function
        monkeypatch.setitem(sys.modules, "planted", module)
        planted = Implementation("native", Level.NATIVE, "planted:function")
        operation = dataclasses.replace(OPERATION, implementations=[OPERATION.reference, planted])
        copy = dataclasses.replace(technique, operations=[operation])
        # In this process: another one would find the technique that is installed, not the copy.
        monkeypatch.setattr(verify_module, "Workers", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(verify_module, "discover", lambda: discovery.Discovery({copy.name: copy}, {}))
        return CliRunner().invoke(cli.app, ["verify", copy.name, "--device", "cpu"], env={"COLUMNS": "200"})

    return run


def test_unchanged_copy_is_green(verify_planted):
    result = verify_planted(right)
    assert result.exit_code == 0, result.output
    assert "wrong" not in result.output


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_plant_is_found(verify_planted, plant):
    result = verify_planted(plant)
    assert result.exit_code == 1, result.output
    named = [line for line in result.output.splitlines() if line.startswith("wrong:")]
    wanted = (f"{OPERATION.name} level 'native'", "case ", PLANTS[plant])
    assert any(all(part in line for part in wanted) for line in named), named
