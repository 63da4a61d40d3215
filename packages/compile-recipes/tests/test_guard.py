"""The guard for a project's own tests, and budgets for CI."""

import json

import pytest
import torch
from torch import nn

from kernel_pytorch.compile_recipes import CompilerOptimizationAssistant, assert_ready
from kernel_pytorch.compile_recipes.guard import over_budget, read_budget


class Branch(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x


def test_a_ready_module_passes():
    assert_ready(nn.Linear(4, 4), torch.ones(2, 4), saved_bytes=0)


def test_a_break_fails_and_its_line_is_named():
    with pytest.raises(AssertionError, match=r"breaks: 1, allowed 0\n  .*test_guard\.py:\d+: Data-dependent"):
        assert_ready(Branch(), torch.ones(2, 4))
    assert_ready(Branch(), torch.ones(2, 4), breaks=1, graphs=2)


def test_another_shape_makes_a_graph_more():
    shapes = [(torch.ones(3, 4),)]
    with pytest.raises(AssertionError, match="graphs: 2, allowed 1"):
        assert_ready(nn.Linear(4, 4), torch.ones(2, 4), shapes=shapes)
    assert_ready(nn.Linear(4, 4), torch.ones(2, 4), shapes=shapes, graphs=2, recompiles=1)


def test_saved_bytes_are_limited_and_the_line_is_named():
    with pytest.raises(AssertionError, match=r"saved_bytes: 128 .*allowed 100"):
        assert_ready(nn.Sequential(nn.Linear(4, 16), nn.GELU()), torch.ones(2, 4), saved_bytes=100)


@pytest.mark.parametrize("text", ["[]", '{"breaks": 0.5}', '{"brakes": 0}', "{", '{"breaks": true}'])
def test_a_budget_that_is_none_is_refused(text, tmp_path):
    (tmp_path / "budget.json").write_text(text)
    with pytest.raises(ValueError, match=r"budget\.json"):
        read_budget(tmp_path / "budget.json")


def test_a_report_is_held_to_a_budget():
    report = CompilerOptimizationAssistant().analyze_component(Branch(), torch.ones(2, 4))
    assert over_budget(report, {"breaks": 1, "graphs": 2}) == []
    assert over_budget(report, {"breaks": 0, "operators": 1}) == ["breaks: 1, allowed 0", "operators: 3, allowed 1"]


def test_what_fails_is_over_every_budget():
    report = CompilerOptimizationAssistant().analyze_component(nn.Linear(4, 4), torch.ones(2, 5))
    (line,) = over_budget(report, json.loads('{"breaks": 9}'))
    assert "RuntimeError" in line
