"""`kernel-pytorch models`: whole models in turns, on a CPU small."""

import json

import pytest
import torch
from typer.testing import CliRunner

from kernel_pytorch.harness.cli import app
from kernel_pytorch.harness.models import run
from kernel_pytorch.harness.models.page import markdown
from kernel_pytorch.harness.models.record import Record, RecordError, load
from kernel_pytorch.harness.models.variants import VARIANTS, Variant
from kernel_pytorch.harness.models.works import WORKS, find_work
from kernel_pytorch.harness.models.zoo import MODELS, find_model
from kernel_pytorch.harness.technique import Technique

pytest.importorskip("transformers")
CPU = torch.device("cpu")
OURS = next(each for each in VARIANTS if each.name == "ours")


def command(*arguments):
    return CliRunner().invoke(app, ["models", *arguments])


def test_a_table_and_a_record(tmp_path):
    file = tmp_path / "models.json"
    found = command("vit", "--device", "cpu", "--variant", "ours", "--rounds", "8", "--json", str(file))
    assert found.exit_code == 0, found.output
    assert "ViT-B/16: training step" in found.output
    assert all(len(line) <= 80 for line in found.output.splitlines() if "│" in line)
    rows = load(file).runs["vit/training"].rows
    assert [row.variant for row in rows] == ["stock", "ours"]
    assert rows[1].cost.replaced > 0
    assert rows[1].cost.losses
    assert rows[1].cost.difference < 0.01
    command("bert", "--device", "cpu", "--variant", "ours", "--rounds", "8", "--json", str(file))
    assert set(load(file).runs) == {"vit/training", "bert/training"}


def test_resumed_and_written_into_a_readme(tmp_path):
    file, readme = tmp_path / "models.json", tmp_path / "README.md"
    given = ("vit", "--device", "cpu", "--variant", "ours", "--rounds", "8", "--json", str(file))
    assert command(*given).exit_code == 0
    found = command(*given, "--resume")
    assert found.exit_code == 0
    assert "training step" not in found.output
    readme.write_text("# A\n<!-- models:begin -->\n<!-- models:end -->\n")
    assert command("--readme", str(readme), "--json", str(file)).exit_code == 0
    assert "| ViT-B/16 |" in readme.read_text()
    assert "x |" in readme.read_text()
    assert "Training step" in markdown(load(file))
    assert command("--readme", str(readme)).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nanogpt"], "model: given 'nanogpt'; allowed are llama, qwen3"),
        (["llama", "--work", "sleep"], "work: given 'sleep'; allowed are training"),
        (["llama", "--variant", "fast"], "variant: given 'fast'; allowed are stock"),
    ],
)
def test_a_name_that_does_not_exist(arguments, message):
    found = command(*arguments)
    assert found.exit_code == 2
    assert message in found.output


def test_no_record(tmp_path):
    (tmp_path / "models.json").write_text("{}")
    with pytest.raises(RecordError, match="is no record of models"):
        load(tmp_path / "models.json")
    assert Record(runs={}).model_dump() == {"runs": {}}


class Planted(Technique):
    """A technique whose patch makes the model wrong."""

    def patch(self, model):
        model.classifier.forward = lambda x: 1.5 * torch.nn.functional.linear(x, model.classifier.weight)
        return type("Patched", (), {"replaced": {"classifier": "planted"}})()


def measured(techniques, variants=(VARIANTS[0], OURS), work="prefill", model="vit"):
    return run.measure(find_model(model), find_work(work), variants, techniques, CPU, tiny=True, rounds=8)


def test_a_wrong_patch_is_seen():
    planted = Planted("planted", "", "", [], "", replacements="planted")
    assert measured([planted])[1].cost.difference > 0.2
    assert measured([])[1].cost.difference == 0.0


class Emptied(Technique):
    """A technique whose patch leaves out every feed-forward: at random weights the loss hardly shows it."""

    def patch(self, model):
        for layer in model.vit.layers:
            layer.layernorm_after.forward = torch.zeros_like
        return type("Patched", (), {"replaced": {"mlp": "planted"}})()


def test_a_missing_piece_is_seen_in_the_gradients():
    emptied = Emptied("emptied", "", "", [], "", replacements="planted")
    assert measured([emptied], work="training")[1].cost.gradients > 0.1
    assert measured([], work="training")[1].cost.gradients < 1e-5


def test_what_cannot_run_is_left_out_with_its_reason():
    rows = measured([], (VARIANTS[0], Variant("graphs", "", compiled="reduce-overhead")))
    assert rows[1].cost is None
    assert rows[1].reason == "CUDA graphs of inference alone"
    assert not rows[1].failed


def test_what_fails_is_named(monkeypatch):
    def broken(*given):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(Variant, "prepare", broken)
    first, second = measured([], (VARIANTS[0], OURS))
    assert first.failed
    assert first.reason == "RuntimeError: no such kernel"
    assert second.failed
    assert command("vit", "--device", "cpu", "--variant", "ours", "--rounds", "8").exit_code == 1


@pytest.mark.parametrize("work", [w for w in WORKS if not w.training], ids=lambda w: w.name)
def test_every_work_gives_what_stock_gives(work):
    for spec in MODELS:
        if work.applies(spec) and (spec.name == "llama" or not work.cached):
            rows = measured([], (VARIANTS[0], VARIANTS[0]), work.name, spec.name)
            assert rows[0].cost.difference == 0.0, spec.name


@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.name)
def test_real_sizes_are_those_that_were_published(spec):
    config = json.dumps(spec.options)
    assert spec.source
    assert "tiny" not in config
    assert {*spec.tiny} <= {*spec.options} | {"n_embd", "n_layer", "n_head", "vocab_size", "num_attention_heads",
                                              "num_key_value_heads", "head_dim", "hidden_size", "intermediate_size",
                                              "num_hidden_layers", "image_size", "patch_size"}  # fmt: skip
