"""examples/progressive_optimization.py: one block at every level, counted."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "examples" / "progressive_optimization.py"


@pytest.mark.examples
def test_each_step_is_counted_and_the_sentences_follow_from_the_figures(capsys):
    spec = importlib.util.spec_from_file_location("progressive_example", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.main(["--quick"])
    printed = capsys.readouterr().out
    assert found["naive"].kernels > found["native"].kernels >= found["default"].kernels > 0
    assert found["naive"].moved > found["native"].moved
    assert found["naive"].kept > found["native"].kept
    for name in ("PyTorch, compiled", "default, compiled"):
        assert 0 < found[name].kernels < found["native"].kernels
    assert f"From naive to native: {found['naive'].kernels} kernels become {found['native'].kernels}" in printed
    assert "default against the best PyTorch: " in printed
    assert "wrong" not in printed
