"""Planted faults in the linear group: `kernel-pytorch verify` must turn red on each."""

import dataclasses

import pytest
import torch

from kernel_pytorch.fused_ln_act import levels
from kernel_pytorch.fused_ln_act.linear.levels import reference
from kernel_pytorch.fused_ln_act.technique import technique
from kernel_pytorch.harness.mutants import failures_of
from kernel_pytorch.harness.technique import Level

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


triton = levels.LADDER.function("linear_act", "triton")


def launched_twice(x, weight, bias, activation, save):
    return triton(x, weight, bias, activation, save) + 0 * triton(x, weight, bias, "silu", True)


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


MUTANTS = [
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


def failures(function, name):
    """On the first core case, float32, without adversaries: what is planted shows on ordinary shapes."""
    if function is launched_twice and (
        reason := levels.LADDER.unavailable("triton", torch.device("cpu"), torch.float32)
    ):
        pytest.skip(reason)
    first = next(point for point in technique.operation(name).test_grid.points if point.core)

    def alone(point):
        return dataclasses.replace(point, dtypes=(torch.float32,)) if point is first else None

    level = Level.TRITON if function is launched_twice else Level.NATIVE
    return failures_of(technique, name, function, level=level, points=alone, adversarial=False)


@pytest.mark.parametrize(
    ("name", "function"), [("linear_act", reference.linear_act), ("gated_mlp", reference.gated_mlp)]
)
def test_an_unchanged_copy_is_right(name, function):
    assert failures(function, name) == []


@pytest.mark.parametrize(("mutant", "name", "message"), MUTANTS, ids=[mutant.__name__ for mutant, *_ in MUTANTS])
def test_mutant_is_found(mutant, name, message):
    found = failures(mutant, name)
    assert any(f"{name} level" in line and "case " in line and message in line for line in found), found
