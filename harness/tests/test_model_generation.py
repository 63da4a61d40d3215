"""Works that decode and generate: decoders of their own, and generations that differ by rounding alone."""

import dataclasses

import pytest
import torch

from kernel_pytorch.harness.models import run
from kernel_pytorch.harness.models.page import headline
from kernel_pytorch.harness.models.plain import PlainDecoder
from kernel_pytorch.harness.models.record import Record, Run
from kernel_pytorch.harness.models.variants import VARIANTS
from kernel_pytorch.harness.models.works import elements_read, find_work
from kernel_pytorch.harness.models.zoo import find_model
from kernel_pytorch.harness.technique import Technique

pytest.importorskip("transformers")
CPU = torch.device("cpu")
NAMED = {variant.name: variant for variant in VARIANTS}


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def measured(variant, work, techniques=(), model="llama"):
    variants = (NAMED["stock"], NAMED[variant])
    return run.measure(find_model(model).as_tiny(), find_work(work), variants, techniques, CPU, rounds=8)


@pytest.mark.parametrize("work", ["decode-1", "decode-8"])
def test_the_plain_decoder_gives_what_stock_gives(work):
    _, plain = measured("plain", work)
    assert plain.cost.difference < 1e-5


class Forgetful(PlainDecoder):
    """Writes each word over the one before it."""

    def step(self):
        super().step()
        self.position.sub_(1)

    def start(self, input_ids, attention_mask):
        super().start(input_ids, attention_mask)
        self.position.sub_(1)


class Unpadded(PlainDecoder):
    """Refuses prompts that may be padded, as a decoder does that infers a mask from the word that pads."""

    def start(self, input_ids, attention_mask):
        assert attention_mask.shape == input_ids.shape
        assert attention_mask.all()
        super().start(input_ids, attention_mask)


def test_a_wrong_decoder_is_seen():
    planted = Technique("planted", "", "", [], "", decoder=f"{__name__}:Forgetful")
    _, wrong = measured("decoder", "decode-1", [planted])
    assert wrong.cost.difference > 1e-3
    right = Technique("right", "", "", [], "", decoder=f"{__name__}:Unpadded")
    assert measured("decoder", "decode-1", [right])[1].cost.difference < 1e-5


class Mumbling(Technique):
    """A technique whose patch generates other words."""

    def patch(self, model, *, gpu_bound=False):
        generate = type(model).generate

        def mumble(words, **options):
            made = generate(model, words, **options)
            return (made + torch.arange(made.shape[1])) % model.config.vocab_size

        model.generate = mumble
        return type("Patched", (), {"replaced": {"generate": "planted"}})()


def test_a_wrong_generation_is_seen():
    _, wrong = measured("ours", "generate", [Mumbling("planted", "", "", [], "", replacements="planted")])
    assert wrong.cost.difference > 0.05
    assert run.failures([wrong])


@pytest.mark.parametrize(
    ("variant", "work", "model", "reason"),
    [
        ("decoder", "decode-1", "llama", "no technique that is installed, or named with --only, has a decoder"),
        ("decoder", "training", "llama", "by works that decode"),
        ("plain", "decode-1", "gemma2", "does not cover this model"),
        ("autotune", "prefill", "llama", "takes minutes"),
        ("graphs", "generate", "llama", "on a GPU alone"),
        ("ours-best", "generate", "llama", "captured by our patch"),
    ],
)
def test_what_does_not_run_says_why(variant, work, model, reason):
    _, row = measured(variant, work, model=model)
    assert reason in row.reason
    assert not row.failed


def test_decoding_has_a_table_of_its_own():
    rows = measured("plain", "decode-1")
    record = Record(runs={"llama/decode-1": Run(**dict(run.origin([], CPU, tiny=True)), rows=rows)})
    table = headline(record)
    assert "| decoding | stock, ms | plain decoder, torch.compile |" in table
    assert "decode of 1 sequence, static cache |" in table


def test_the_limit_counts_what_a_word_reads():
    """Each weight once, keys and values of all words before; of the embedding one row, unless it is the head too."""
    spec = find_model("llama").as_tiny()
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64  # q and output, k and v, gate, up and down, norms
    cache = 32 * 2 * 2 * 16  # words, keys and values, heads, columns
    for batch in (1, 8):
        weights = 2 * layer + 64 + 203 * 64  # tied
        assert elements_read(find_work(f"decode-{batch}"), spec, spec.build()) == weights + batch * 2 * cache
    untied = dataclasses.replace(spec, options={**spec.options, "tie_word_embeddings": False})
    assert elements_read(find_work("decode-1"), untied, untied.build()) == weights + 2 * cache
    windowed = find_model("gemma2").as_tiny()
    windowed.options["sliding_window"] = 8  # of one of its two layers
    model = windowed.build()
    weights = sum(p.numel() for p in model.parameters())
    assert elements_read(find_work("decode-1"), windowed, model) == weights + cache + cache * 8 // 32


def test_a_whole_model_has_the_layers_that_were_published(monkeypatch):
    taken = []
    monkeypatch.setattr(run, "_ready", lambda variant, spec, *given: taken.append(spec.options["num_hidden_layers"]))
    monkeypatch.setattr(run, "step_seconds", lambda *given: {})
    monkeypatch.setattr(type(find_model("llama")), "build", lambda self: None)
    for name in ("decode-1", "decode-1-whole"):
        with pytest.raises(AttributeError):  # nothing was prepared
            run.measure(find_model("llama"), find_work(name), VARIANTS[:1], (), CPU, rounds=8)
    assert taken == [8, 16]
    for spec in (find_model("llama").as_tiny(), find_model("llama-small"), find_model("bert")):
        assert spec.as_whole() is spec


def test_the_share_of_the_limit_is_shown_beside_decoding():
    row = measured("plain", "decode-1")[1]
    cost = row.cost.model_copy(update={"limit": row.cost.wall * 0.625})
    rows = [row.model_copy(update={"variant": name, "cost": cost}) for name in ("stock", "decoder")]
    origin = run.origin([], CPU, tiny=True)
    shown = headline(Record(runs={"llama/decode-1": Run(**dict(origin), rows=rows)}))
    assert "| its share of the limit |" in shown
    assert shown.rstrip().endswith("| 0.62 |")
