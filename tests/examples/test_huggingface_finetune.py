"""Fine-tuning at quick size: the same losses as stock, with the Trainer and with adapters."""

import pytest

# peft asks transformers by an old name.
pytestmark = [pytest.mark.examples, pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")]


def test_losses_are_those_of_stock(example, capsys, tmp_path):
    for name in ("transformers", "accelerate", "peft"):
        pytest.importorskip(name)
    example("huggingface_finetune").main(["--quick", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "same losses" in printed
    assert "swiglu" in printed or "gated" in printed  # what patch replaced
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()


def test_missing_libraries_are_named(example, capsys, monkeypatch):
    module = example("huggingface_finetune")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        module.main(["--quick"])
    assert "transformers is missing: pip install transformers accelerate peft" in capsys.readouterr().err
