"""The example of graphs, at quick size."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.examples
ROOT = Path(__file__).parents[2]


def test_two_labels_split_the_club_and_segments_repeat(capsys):
    pytest.importorskip("networkx", reason="it holds the graph: pip install networkx")
    spec = importlib.util.spec_from_file_location("graph_example", ROOT / "examples" / "graph.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    right, speedup = example.main(["--quick"])
    printed = capsys.readouterr().out
    assert 0.9 < right <= 1.0
    assert speedup > 1.0
    assert "wrong" not in printed
    assert "Sorted once, segments take" in printed.splitlines()[-1]
