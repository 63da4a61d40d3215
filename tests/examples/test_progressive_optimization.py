"""examples/progressive_optimization.py: one block at every level, counted."""

import pytest


@pytest.mark.examples
def test_each_step_is_counted_and_the_sentences_follow_from_the_figures(example, capsys):
    found = example("progressive_optimization").main(["--quick"])
    printed = capsys.readouterr().out
    assert found["naive"].kernels > found["native"].kernels >= found["default"].kernels > 0
    assert found["naive"].moved > found["native"].moved
    assert found["naive"].kept > found["native"].kept
    for name in ("PyTorch, compiled", "default, compiled"):
        assert 0 < found[name].kernels < found["native"].kernels
    assert f"From naive to native: {found['naive'].kernels} kernels become {found['native'].kernels}" in printed
    assert "default against the best PyTorch: " in printed
    assert "wrong" not in printed
