"""Planted faults in the linear group: `kernel-pytorch verify` must turn red on each."""

import contextlib
import dataclasses
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

from kernel_pytorch.fused_ln_act import levels
from kernel_pytorch.fused_ln_act.linear import autograd, reference
from kernel_pytorch.fused_ln_act.technique import technique
from kernel_pytorch.harness import cli, discovery
from kernel_pytorch.harness.commands import verify as verify_module
from kernel_pytorch.harness.technique import Implementation, Level

pytestmark = pytest.mark.slow

# A linear layer.


def the_other_activation(x, weight, bias, activation, save):
    other = {"gelu": "gelu_tanh", "gelu_tanh": "gelu"}.get(activation, activation)
    return reference.linear_act(x, weight, bias, other, save)


def gradient_of_bias_dropped(x, weight, bias, activation, save):
    return reference.linear_act(x, weight, None if bias is None else bias.detach(), activation, save)


def bias_in_the_output_alone(x, weight, bias, activation, save):
    y = reference.linear_act(x, weight, None if bias is None else bias.detach(), activation, save)
    return y if bias is None else y + (bias - bias.detach())


def last_column_of_x_skipped(x, weight, bias, activation, save):
    return reference.linear_act(x[..., :-1], weight[:, :-1], bias, activation, save) + 0 * (x.sum() + weight.sum())


def one_percent_too_large(x, weight, bias, activation, save):
    return reference.linear_act(x, weight, bias, activation, save) * 1.01


def rounded_to_tf32(x, weight, bias, activation, save):
    if x.dtype != torch.float32:
        return reference.linear_act(x, weight, bias, activation, save)
    rounded = (weight.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return reference.linear_act(x, weight + (rounded - weight).detach(), bias, activation, save)


def launched_twice(x, weight, bias, activation, save):
    return autograd.linear_act(x, weight, bias, activation, save) + 0 * autograd.linear_act(
        x, weight, bias, "silu", True
    )


# A gated MLP.


def swapped(w_gate_up):
    return torch.cat(w_gate_up.chunk(2)[::-1])


def gate_and_up_swapped(x, w_gate_up, w_down, activation, recompute):
    return reference.gated_mlp(x, swapped(w_gate_up), w_down, activation, recompute)


def gate_and_up_by_turns(x, w_gate_up, w_down, activation, recompute):
    turns = torch.cat([w_gate_up[::2], w_gate_up[1::2]])
    return reference.gated_mlp(x, turns, w_down, activation, recompute)


def gradient_of_up_dropped(x, w_gate_up, w_down, activation, recompute):
    gate, up = w_gate_up.chunk(2)
    return reference.gated_mlp(x, torch.cat([gate, up.detach()]), w_down, activation, recompute)


def h_before_the_activation_for_w_down(x, w_gate_up, w_down, activation, recompute):
    y = reference.gated_mlp(x, w_gate_up, w_down.detach(), activation, recompute)
    wrong = reference.gated_mlp(x.detach(), w_gate_up.detach(), w_down, "identity", recompute)
    return y + (wrong - wrong.detach())


def mlp_too_large(x, w_gate_up, w_down, activation, recompute):
    return reference.gated_mlp(x, w_gate_up, w_down, activation, recompute) * 1.01


PLANTS = [
    (the_other_activation, "linear_act", "output is off by"),
    (gradient_of_bias_dropped, "linear_act", "gradient of bias is missing"),
    (bias_in_the_output_alone, "linear_act", "gradient of bias is off by"),
    (last_column_of_x_skipped, "linear_act", "output is off by"),
    (one_percent_too_large, "linear_act", "output is off by"),
    (rounded_to_tf32, "linear_act", "output is off by"),
    (launched_twice, "linear_act", "launches 2 kernels"),
    (gate_and_up_swapped, "gated_mlp", "output is off by"),
    (gate_and_up_by_turns, "gated_mlp", "output is off by"),
    (gradient_of_up_dropped, "gated_mlp", "gradient of w_gate_up is off by"),
    (h_before_the_activation_for_w_down, "gated_mlp", "gradient of w_down is off by"),
    (mlp_too_large, "gated_mlp", "output is off by"),
]


@pytest.fixture
def verify_planted(monkeypatch):
    """Run the command on a copy of the technique in which one function stands at a level."""

    def run(function, name):
        if function is launched_twice and (reason := levels.unavailable("triton", torch.device("cpu"), torch.float32)):
            pytest.skip(reason)
        module = types.ModuleType("planted_linear")
        module.planted = function
        monkeypatch.setitem(sys.modules, "planted_linear", module)
        level = Level.TRITON if function is launched_twice else Level.NATIVE
        planted = Implementation(level.value, level, "planted_linear:planted")
        operation = technique.operation(name)
        points = [dataclasses.replace(p, dtypes=(torch.float32,)) for p in operation.test_grid.points if p.core][:1]
        operation = dataclasses.replace(
            operation,
            implementations=[operation.reference, planted],
            test_grid=dataclasses.replace(operation.test_grid, points=tuple(points)),
            adversarial=(),
        )
        copy = dataclasses.replace(technique, operations=[operation])
        # In this process: another one would find the technique that is installed, not the copy.
        monkeypatch.setattr(verify_module, "Workers", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(verify_module, "discover", lambda: discovery.Discovery({"fused-ln-act": copy}, {}))
        return CliRunner().invoke(cli.app, ["verify", "fused-ln-act", "--device", "cpu"], env={"COLUMNS": "200"})

    return run


@pytest.mark.parametrize(
    ("name", "function"), [("linear_act", reference.linear_act), ("gated_mlp", reference.gated_mlp)]
)
def test_unchanged_copy_is_green(verify_planted, name, function):
    result = verify_planted(function, name)
    assert result.exit_code == 0, result.output
    assert "wrong" not in result.output


@pytest.mark.parametrize(("plant", "name", "message"), PLANTS, ids=[plant.__name__ for plant, *_ in PLANTS])
def test_plant_is_found(verify_planted, plant, name, message):
    result = verify_planted(plant, name)
    assert result.exit_code == 1, result.output
    named = [line for line in result.output.splitlines() if line.startswith("wrong:")]
    assert any(f"{name} level" in line and "case " in line and message in line for line in named), named
