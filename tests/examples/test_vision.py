"""The example of images, at quick size."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.examples
ROOT = Path(__file__).parents[2]


def test_both_models_learn_digits(capsys):
    pytest.importorskip("sklearn", reason="it holds the images: pip install scikit-learn", exc_type=ImportError)
    spec = importlib.util.spec_from_file_location("vision_example", ROOT / "examples" / "vision.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    accuracies = example.main(["--quick"])
    printed = capsys.readouterr().out
    assert min(accuracies.values()) > 0.95
    assert {*accuracies} == {"ConvNet", "ViT"}
    assert "wrong" not in printed
    assert printed.count("ConvNet, folded") >= 2
