"""Bytes and FLOPs of recorded calls, against what is counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kernel_pytorch.harness.profiling import cost, events
from kernel_pytorch.harness.profiling.cost import flops, traffic

CPU = torch.device("cpu")
X, Y, WEIGHT = torch.randn(8, 16), torch.randn(8, 16), torch.randn(16)
TABLE, ROWS = torch.randn(1000, 16), torch.tensor([3, 1, 999])
ROW = 8 * 16 * 4
library = torch.library.Library("profiling_cost_test", "DEF")
library.define("doubled(Tensor x, str how) -> Tensor")
library.impl("doubled", lambda x, how: x * 2, "CPU")


def recorded(function):
    """The calls of one run."""
    recorder = events.profiler(CPU)
    with recorder:
        function()
    return events.read(recorder, CPU)[0]


def call_of(function, name):
    """The only call of that operator."""
    (found,) = [call for call in recorded(function) if call.name == name]
    return found


MOVED = {
    "two inputs and an output": (lambda: X + Y, "aten::add", 3 * ROW),
    "the same tensor twice is read once": (lambda: X * X, "aten::mul", 2 * ROW),
    "broadcast": (lambda: X * WEIGHT, "aten::mul", 2 * ROW + 64),
    "an expanded input is as large as what it expands": (lambda: X * WEIGHT.expand(8, 16), "aten::mul", 2 * ROW + 64),
    "in place: read and written": (lambda: X.clone().add_(Y), "aten::add_", 3 * ROW),
    "a copy does not read its target": (lambda: X.clone().copy_(Y), "aten::copy_", 2 * ROW),
    "out= is written only": (lambda: torch.add(X, Y, out=torch.empty(8, 16)), "aten::add", 3 * ROW),
    "a fill only writes": (lambda: torch.empty(8, 16).fill_(1.0), "aten::fill_", ROW),
    "a factory's fill": (lambda: torch.zeros(8, 16), "aten::zeros", ROW),
    "memory set aside": (lambda: torch.empty(8, 16), "aten::empty", 0),
    "a view": (lambda: X.transpose(0, 1), "aten::transpose", 0),
    "a view, but not by its schema": (lambda: torch.ops.aten._unsafe_view(X, [16, 8]), "aten::_unsafe_view", 0),
    "a view in place": (lambda: X.clone().transpose_(0, 1), "aten::transpose_", 0),
    "a reduction": (lambda: X.sum(1), "aten::sum", ROW + 32),
    "a temporary does not count": (lambda: X.mean(1), "aten::mean", ROW + 32),
    "two outputs": (lambda: X.max(1), "aten::max", ROW + 32 + 64),
    "a list of inputs": (lambda: torch.cat([X, Y]), "aten::cat", 4 * ROW),
    "a matrix product and its bias": (
        lambda: F.linear(X, TABLE[:4], WEIGHT[:4]), "aten::addmm", ROW + 4 * 64 + 16 + 8 * 4 * 4,
    ),
    "a lookup reads the rows that it returns": (lambda: F.embedding(ROWS, TABLE), "aten::embedding", 2 * 3 * 64 + 24),
    "a lookup into out=": (
        lambda: torch.index_select(TABLE, 0, ROWS, out=torch.empty(3, 16)), "aten::index_select", 2 * 3 * 64 + 24,
    ),
    "rows added to a table: as much of it is read and written": (
        lambda: torch.zeros(1000, 16).index_add_(0, ROWS, TABLE[:3]), "aten::index_add_", 3 * (3 * 64 + 24),
    ),
    "one number to the host": (lambda: X.sum().item(), "aten::_local_scalar_dense", 4),
    "half precision": (lambda: X.bfloat16().relu(), "aten::relu", ROW),
}  # fmt: skip


@pytest.mark.parametrize("what", MOVED)
def test_bytes_are_those_counted_by_hand(what):
    function, name, expected = MOVED[what]
    assert traffic(call_of(function, name))[0] == expected


def test_a_count_without_the_exceptions_would_be_seen(monkeypatch):
    function, name, expected = MOVED["a lookup reads the rows that it returns"]
    monkeypatch.setattr(cost, "READS_SOME", set())
    assert traffic(call_of(function, name))[0] > 50 * expected


def test_what_is_not_known_is_not_guessed(machine):
    sparse = call_of(lambda: torch.sparse.mm(X.to_sparse(), torch.randn(16, 2)), "aten::_sparse_addmm")
    (row,) = cost.operator_uses([sparse], machine.ceilings)
    assert (row.bytes, row.bytes_note) == (None, "not known: an argument is sparse")
    host = call_of(lambda: F.linear(X, TABLE), "aten::linear")
    assert (host.kind, traffic(host)[0]) == ("host", None)
    assert flops(host)[0] is None
    relu = flops(call_of(X.relu, "aten::relu"))
    assert relu == (None, "not counted: torch has no formula for it")


COUNTED = {
    "mm": (lambda: X @ TABLE.t(), "aten::mm", 2 * 8 * 16 * 1000),
    "addmm": (lambda: F.linear(X, TABLE, torch.randn(1000)), "aten::addmm", 2 * 8 * 16 * 1000),
    "bmm": (lambda: torch.randn(3, 4, 5) @ torch.randn(3, 5, 6), "aten::bmm", 2 * 3 * 4 * 5 * 6),
    "convolution, whose formula needs the output": (
        lambda: F.conv2d(torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3), stride=2, padding=1), "aten::convolution",
        2 * 2 * 4 * 5 * 5 * 3 * 9,
    ),
    "attention": (
        lambda: F.scaled_dot_product_attention(*torch.randn(3, 2, 4, 8, 16)),
        "aten::_scaled_dot_product_flash_attention_for_cpu", 2 * 2 * 2 * 4 * 8 * 8 * 16,
    ),
    "causal attention": (
        lambda: F.scaled_dot_product_attention(*torch.randn(3, 2, 4, 8, 16), is_causal=True),
        "aten::_scaled_dot_product_flash_attention_for_cpu", 2 * 2 * 2 * 4 * (8 * 9 // 2) * 16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", COUNTED)
def test_flops_are_those_counted_by_hand(what):
    function, name, expected = COUNTED[what]
    assert flops(call_of(function, name))[0] == expected


def test_a_custom_operator_has_bytes_and_its_own_formula():
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    def run():
        torch.ops.profiling_cost_test.doubled(X, "fast")

    call = call_of(run, "profiling_cost_test::doubled")
    assert (call.kind, traffic(call)[0]) == ("operator", 2 * ROW)
    assert flops(call)[0] is None
    operator = torch.ops.profiling_cost_test.doubled
    register_flop_formula(operator)(lambda shape, how, out_shape=None: torch.Size(shape).numel())
    try:
        # The profiler records no strings, and the operator has no fake: the formula is asked without an output.
        assert flops(call)[0] == 8 * 16
    finally:
        del flop_registry[operator]


def test_a_formula_that_fails_is_no_count():
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    operator = torch.ops.aten.cumsum
    register_flop_formula(operator)(lambda *shapes, **named: 1 // 0)
    try:
        assert flops(call_of(lambda: X.cumsum(0), "aten::cumsum"))[1] == (
            "not counted: the formula failed (ZeroDivisionError)"
        )
    finally:
        del flop_registry[operator]


def test_equal_inputs_with_results_of_different_sizes_are_two_rows(machine):
    calls = recorded(lambda: (X.sum(0), X.sum(1)))
    rows = [row for row in cost.operator_uses(calls, machine.ceilings) if row.name == "aten::sum.dim_IntList"]
    assert sorted(row.bytes for row in rows) == [ROW + 32, ROW + 64]


def test_time_in_python_code_of_a_function_is_the_hosts():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * 2

    calls = {call.name: call for call in recorded(lambda: Doubled.apply(X.clone().requires_grad_()))}
    assert calls["Doubled"].kind == "host"
    assert calls["aten::mul"].kind == "operator"


def test_nested_modules_of_the_library_are_units_too():
    names = [call.name for call in recorded(lambda: nn.LayerNorm(16)(X)) if call.kind == "operator"]
    assert "aten::native_layer_norm" in names
    assert "aten::empty" in names  # of the parameters
