"""`kernel-pytorch models`: whole models in turns, on a CPU small."""

import copy
import dataclasses
import os
import re
import time

import pytest
import torch
from typer.testing import CliRunner

from kernel_pytorch.harness.cli import app
from kernel_pytorch.harness.clock import wall
from kernel_pytorch.harness.commands import models
from kernel_pytorch.harness.discovery import Discovery, discover
from kernel_pytorch.harness.models import host, losses, page, run
from kernel_pytorch.harness.models.page import markdown
from kernel_pytorch.harness.models.record import Curves, Record, load
from kernel_pytorch.harness.models.variants import OURS, STOCK, VARIANTS, Variant
from kernel_pytorch.harness.models.works import WORKS, find_work, prepare, step_of
from kernel_pytorch.harness.models.zoo import MODELS, SMALL, find_model
from kernel_pytorch.harness.records import RecordError
from kernel_pytorch.harness.technique import Technique

pytest.importorskip("transformers")
CPU = torch.device("cpu")
AGAIN = Variant("again", "again")


def command(*arguments):
    return CliRunner().invoke(app, ["models", *arguments])


def test_a_table_and_a_record(tmp_path):
    file = tmp_path / "models.json"
    variants = ("--variant", "ours", "--variant", "ours-gpu-bound")
    found = command("vit", "--device", "cpu", *variants, "--rounds", "8", "--json", str(file))
    assert found.exit_code == 0, found.output
    assert "ViT-B/16: training step" in found.output
    assert "the present kernels, which the record names" in found.output
    assert all(len(line) <= 80 for line in found.output.splitlines() if "│" in line)
    rows = load(file).runs["vit/training"].rows
    assert [row.variant for row in rows] == ["stock", "ours", "ours-gpu-bound"]
    assert rows[2].cost.replaced > rows[1].cost.replaced  # its norms
    assert rows[2].cost.losses
    assert rows[2].cost.difference < 0.01
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
    with pytest.raises(RecordError, match="not a record of models"):
        load(tmp_path / "models.json")
    assert Record(runs={}).model_dump() == {"runs": {}, "losses": {}}


class Mutant(Technique):
    """A technique whose patch makes the model wrong."""

    def patch(self, model, *, gpu_bound=False):
        model.classifier.forward = lambda x: 1.5 * torch.nn.functional.linear(x, model.classifier.weight)
        return type("Patched", (), {"replaced": {"classifier": "planted"}})()


def measured(techniques, variants=(STOCK, OURS), work="prefill", model="vit"):
    return run.measure(find_model(model).as_tiny(), find_work(work), variants, techniques, CPU, rounds=8)


def test_a_wrong_patch_is_seen():
    planted = Mutant("planted", "", "", [], "", replacements="planted")
    assert measured([planted])[1].cost.difference > 0.2
    assert measured([], (STOCK, AGAIN))[1].cost.difference == 0.0


class Emptied(Technique):
    """A technique whose patch leaves out every feed-forward: at random weights the loss hardly shows it."""

    def patch(self, model, *, gpu_bound=False):
        for layer in model.vit.layers:
            layer.layernorm_after.forward = torch.zeros_like
        return type("Patched", (), {"replaced": {"mlp": "planted"}})()


@pytest.mark.slow
def test_a_missing_piece_is_seen_in_the_gradients():
    emptied = Emptied("emptied", "", "", [], "", replacements="planted")
    assert measured([emptied], work="training")[1].cost.gradients > 0.1
    assert measured([], (STOCK, AGAIN), "training")[1].cost.gradients < 1e-5


def test_what_cannot_run_is_left_out_with_its_reason():
    rows = measured([], (STOCK, Variant("graphs", "", compiled="reduce-overhead")))
    assert rows[1].cost is None
    assert rows[1].reason == "CUDA graphs of inference alone"
    assert not rows[1].failed


def test_without_a_technique_there_is_nothing_of_ours():
    _, ours = measured([], (STOCK, OURS))
    assert ours.cost is None
    assert ours.reason == "no technique is installed"


def test_a_broken_technique_is_no_model_without_it(monkeypatch):
    found = Discovery({}, {"rmsnorm": "ImportError: an old library"})
    monkeypatch.setattr(models, "discover", lambda: found)
    ended = command("vit", "--device", "cpu", "--variant", "ours")
    assert ended.exit_code == 2
    assert "mend or uninstall what is broken" in ended.output


def test_what_fails_is_named(monkeypatch):
    def broken(*given):
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(Variant, "prepare", broken)
    first, second = measured([], (STOCK, VARIANTS[1]))
    assert first.failed
    assert first.reason == "RuntimeError: no such kernel"
    assert second.failed
    assert command("vit", "--device", "cpu", "--variant", "ours", "--rounds", "8").exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize("work", [w for w in WORKS if not w.training], ids=lambda w: w.name)
def test_every_work_gives_what_stock_gives(work):
    for spec in MODELS:
        if work.applies(spec) and (spec.name == "llama" or not work.cached):
            rows = measured([], (STOCK, AGAIN), work.name, spec.name)
            assert rows[1].cost.difference == 0.0, spec.name


class Slower(Technique):
    """A technique whose patch scales the gradient of one layer of the classifier: the first loss is that of stock."""

    def patch(self, model, *, gpu_bound=False):
        weight = model.classifier.weight
        weight.register_hook(lambda gradient: torch.where(gradient.abs() > gradient.abs().median(), gradient, 0.0))
        return type("Patched", (), {"replaced": {"classifier": "planted"}})()


@pytest.mark.parametrize("mutant", [Mutant, Emptied, Slower])
def test_a_patch_that_learns_otherwise_is_seen_in_the_losses(mutant):
    found = losses.compare_losses(
        find_model("vit").as_tiny(), [mutant("planted", "", "", [], "", replacements="p")], CPU
    )
    assert found.difference > 10 * found.allowed


@pytest.fixture
def in_bfloat16(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(losses, "prepare", lambda work, model, device: model.to(torch.bfloat16).train())


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [Mutant, Emptied])
def test_in_16_bits_a_mutant_is_farther(in_bfloat16, mutant):
    found = losses.compare_losses(
        find_model("vit").as_tiny(), [mutant("planted", "", "", [], "", replacements="p")], CPU
    )
    assert found.held == found.errors[0] > found.allowed


def test_a_loss_that_is_not_finite_is_no_loss():
    assert losses.distance([1.0, float("nan")], [1.0, 1.0]) == float("inf")
    assert losses.curves("float32", (2.0, 1.0), (2.0, 1.5)).held == 0.5


def test_in_16_bits_the_distance_from_float32_decides():
    stock, exact = (2.0, 1.0), (2.0, 0.97)
    nearer, farther = (losses.curves("bfloat16", stock, ours, exact) for ours in ((2.0, 0.93), (2.0, 1.04)))
    assert nearer.allowed == farther.allowed == pytest.approx(2 * 0.03 / 0.97)
    assert nearer.held < nearer.allowed < nearer.difference
    assert farther.difference < farther.allowed < farther.held
    assert losses.curves("float32", stock, stock).errors is None


def test_records_with_other_seeds_keep_their_bar():
    """They are older: runs of stock with other rounding errors limited the difference from stock."""
    known = losses.curves("bfloat16", (1.0,), (1.1,)).model_dump()
    assert Curves(**known, seeds=((1.0,),)).held == known["difference"]


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "bert", "vit"])
def test_what_is_computed_in_float32_keeps_weights_in_16_bits(name):
    """Tied weights, tables of positions and masks, whose dtype a model reads off its weights."""
    spec = find_model(name).as_tiny()
    torch.manual_seed(0)
    model = spec.build().eval().bfloat16()
    wide = copy.deepcopy(model).float()
    inputs = spec.inputs(find_work("training").shape(spec), CPU)
    loss, expected = losses.in_float32(model)(**inputs).loss, wide(**losses.widened(inputs)).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for (path, narrow), exact in zip(model.named_parameters(), wide.parameters(), strict=True):
        assert narrow.dtype == narrow.grad.dtype == torch.bfloat16
        torch.testing.assert_close(narrow.grad, exact.grad.bfloat16(), msg=path, rtol=0.02, atol=1e-6)


@pytest.mark.slow
def test_losses_are_kept_beside_times(tmp_path, monkeypatch):
    file = tmp_path / "models.json"
    assert command("vit", "--device", "cpu", "--variant", "ours", "--rounds", "8", "--json", str(file)).exit_code == 0
    given = ("vit", "--device", "cpu", "--losses", "--json", str(file))
    found = command(*given)
    assert found.exit_code == 0, found.output
    assert "ViT-B/16, tiny, float32: losses of 20 steps are the same, at most" in found.output
    assert len(load(file).losses["vit"].ours) == 20
    assert "| ViT-B/16 | float32 | " in page.losses(load(file))
    assert page.losses(Record(runs={})) == ""
    assert set(load(file).runs) == {"vit/training"}
    assert "losses" not in command(*given, "--resume").output
    monkeypatch.setattr(losses, "IN_FLOAT32", -1.0)
    found = command(*given)
    assert found.exit_code == 1
    assert "DIFFER" in found.output


def test_the_host_time_of_functions_with_another_default(monkeypatch):
    """Of every one of them, each way slower than the one before where the device does not hide it."""
    technique = discover().techniques["rmsnorm"]
    monkeypatch.setattr(type(technique.ladder()), "default", lambda *_: "torchscript")
    monkeypatch.setattr(wall, "ROUNDS", 1)
    monkeypatch.setattr(wall, "LAUNCHES", 2)
    slow = torch.nn.functional.rms_norm

    def sleeping(*arguments, **keywords):
        time.sleep(0.01)
        return slow(*arguments, **keywords)

    monkeypatch.setattr(torch.nn.functional, "rms_norm", sleeping)
    found = command("--host", "--only", "rmsnorm", "--device", "cpu")
    assert found.exit_code == 0, found.output
    assert "whole calls" in found.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in found.output.splitlines() if "│ " in line]
    assert [row[:2] for row in rows] == [[n, "torchscript"] for n in ("rms_norm", "add_rms_norm", "head_rms_norm")]
    (ratio,) = re.findall(r"\((.*)x\)", rows[0][2])
    assert float(ratio) < 0.5  # what was planted there is what is timed there
    monkeypatch.setattr(type(technique.ladder()), "default", lambda *_: "native")
    assert host.host_table([technique], CPU).row_count == 0


def test_the_host_time_of_a_function_without_gradients(monkeypatch):
    technique = discover().techniques["flash-attn-triton"]
    (decode,) = [operation for operation in technique.operations if not operation.differentiable]
    monkeypatch.setattr(type(technique.ladder()), "default", lambda *_: "torchscript")
    monkeypatch.setattr(wall, "ROUNDS", 1)
    monkeypatch.setattr(wall, "LAUNCHES", 2)
    found = host.host_table([dataclasses.replace(technique, operations=[decode])], CPU)
    assert [[*column.cells] for column in found.columns][3:] == [["-"], ["-"]]


@pytest.mark.slow
def test_what_changes_classes_runs_in_a_process_of_its_own(monkeypatch):
    stages = []
    given = (find_model("vit").as_tiny(), find_work("prefill"), CPU)
    row = run.measure_apart(AGAIN, *given, rounds=8, on_step=stages.append)
    assert (row.variant, row.reason, row.cost.difference) == ("again", None, 0.0)
    assert stages[-1] == "vit, prefill: memory and kernels of again"
    monkeypatch.setattr(run, "_measure", os.kill)  # whose arguments these are not
    row = run.measure_apart(AGAIN, *given, rounds=8, on_step=stages.append)
    assert row.failed
    assert row.reason.startswith("raised TypeError: ")


def test_small_models_are_those_that_were_published_but_smaller():
    assert [model.family for model in SMALL] == [model.name for model in MODELS]
    for model, published in zip(SMALL, MODELS, strict=True):
        assert find_model(f"{published.name}-small") is model
        changed = {name for name in model.options if model.options[name] != published.options.get(name)}
        assert all(model.options[name] < published.options.get(name, float("inf")) for name in changed)
        assert {"num_hidden_layers", "n_layer"} & changed


def test_the_command_takes_small_models(monkeypatch):
    taken = []
    monkeypatch.setattr(models, "measure", lambda spec, *_, **__: taken.append((spec.name, spec.is_tiny)) or ())
    assert command("--small", "--device", "cpu").exit_code == 0
    assert taken == [(model.name, False) for model in SMALL]
    taken.clear()
    assert command("vit-small", "--device", "cpu").exit_code == command("vit", "--device", "cpu").exit_code == 0
    assert taken == [("vit-small", False), ("vit", True)]


@pytest.mark.slow
def test_gpt2_decodes_within_its_table_of_positions():
    """Steps of decoding go on from each other, and 1024 words after a prompt of 1024 would be out of range."""
    spec, work = find_model("gpt2-small"), find_work("decode-1")
    model = prepare(work, spec.build(), CPU)
    step = step_of(work, spec, model, model, CPU)
    assert all(bool(step().isfinite().all()) for _ in range(400))


@pytest.mark.parametrize("way", ["--losses", "--host"])
def test_a_technique_that_does_not_exist(way):
    found = command(way, "--only", "nosuch", "--device", "cpu")
    assert found.exit_code == 2
    assert "--only: given 'nosuch'; allowed are " in found.output


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--losses", "--host"], "--losses and --host: each is a run of its own"),
        (["--losses", "--work", "prefill"], "--losses: it does not take --work; allowed are MODEL, --only"),
        (["bert", "--host"], "--host: it does not take MODEL; allowed are --only"),
        (["--readme", "README.md", "--resume"], "--readme: it does not take --resume; allowed are --json"),
        (["--small", "--tiny"], "--small: given --tiny too"),
    ],
)
def test_options_that_would_not_be_obeyed(given, message):
    found = command(*given)
    assert found.exit_code == 2
    assert message in found.output


def test_a_named_model_of_the_small_size(monkeypatch):
    taken = []
    monkeypatch.setattr(models, "measure", lambda spec, *_, **__: taken.append((spec.name, spec.is_tiny)) or ())
    assert command("llama", "--small", "--device", "cpu").exit_code == 0
    assert taken == [("llama-small", False)]
