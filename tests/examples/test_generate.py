"""Generation at quick size: the tokens of transformers, and what is left to it."""

import pytest

pytestmark = pytest.mark.examples


def test_tokens_are_those_of_transformers(example, capsys):
    pytest.importorskip("transformers")
    example("generate").main(["--quick"])
    printed = capsys.readouterr().out
    assert "the model: Decoder, in generate" in printed
    assert "transformers: 1 calls, the way of generation is beam_search" in printed
    assert "two draws with one seed: equal" in printed
    assert printed.splitlines()[-1].endswith("of transformers: the same tokens.")


def test_missing_libraries_are_named(example, capsys, monkeypatch):
    module = example("generate")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        module.main(["--quick"])
    assert "transformers is missing: pip install transformers" in capsys.readouterr().err
