"""examples/debugging.py: each step keeps the result and changes a count."""

import pytest


@pytest.fixture
def debugging(example):
    return example("debugging")


def test_texts_are_real_lines_padded_behind(debugging):
    batch = debugging.texts(4, 32)
    assert batch.shape == (4, 32)
    assert (batch[:, 0] != 0).all(), "no empty text"
    ends = (batch != 0).sum(1)
    assert all((batch[row, end:] == 0).all() for row, end in enumerate(ends))
    assert len(set(ends.tolist())) > 1


def test_a_step_that_changes_the_result_is_noticed(debugging):
    first = debugging.Found(16, 1)
    wrong = debugging.Operators(16, 1)
    tokens = debugging.texts(2, 8)
    with pytest.raises(AssertionError, match="not close"):
        debugging.examine(wrong, first, tokens, tokens)


@pytest.mark.examples
def test_each_step_changes_a_count(debugging, capsys):
    found = debugging.main(["--quick"])
    printed = capsys.readouterr().out
    assert list(found) == ["as found", "tensors", "masks", "operators"]
    breaks = [counts["breaks"] for counts in found.values()]
    assert breaks[0] > breaks[1] > breaks[2] == breaks[3] == 0
    assert found["masks"]["graphs"] < found["tensors"]["graphs"]
    assert found["operators"]["operators"] < found["masks"]["operators"]
    assert found["operators"]["saved_bytes"] < found["masks"]["saved_bytes"]
    for line in ("logging.Logger", "Dynamic shape operator (GB0036)", "Tensor.item()", "attention by hand"):
        assert line in printed
    assert "of the model as it was found." in printed.splitlines()[-1]
