"""Real text is stable, and a model that is missing says what to install."""

import pytest

from kernel_pytorch.harness import pretrained


def test_real_text_is_prose_in_a_fixed_order():
    text = pretrained.real_text(64)
    assert text == pretrained.real_text(128)[:64]
    assert len(set(text)) == 64
    assert all(len(paragraph) >= 120 and paragraph.endswith(".") for paragraph in text)


def test_real_text_names_the_limits(monkeypatch):
    monkeypatch.setattr(pretrained, "_prose", lambda: iter(["one", "two"]))
    with pytest.raises(ValueError, match="paragraphs is 3; there are 2"):
        pretrained.real_text(3)


def test_without_the_model_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(pretrained, "_MODEL_PACKAGE", "a_package_that_nobody_has")
    with pytest.raises(pretrained.RealInputUnavailable, match=r"^this needs .* pip install [^\n]*$"):
        pretrained.real_model()
