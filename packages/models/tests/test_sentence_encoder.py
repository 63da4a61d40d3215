"""Sentence embeddings: the hidden states of transformers, without padding, from the files of sentence-transformers."""

import copy
import json
import pickle

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_pytorch.harness.pretrained import RealInputUnavailable, _model_folder, real_text
from kernel_pytorch.models import SentenceEncoder, sentence_encoder
from kernel_pytorch.models.bert import BertConfig, BertEncoder, Packed
from kernel_pytorch.models.sentence_encoder import batches

transformers = pytest.importorskip("transformers", reason="it is what hidden states are compared with")
tokenizers = pytest.importorskip("tokenizers", reason="it reads tokenizer.json")

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "home", "fast", "slow", "and"]
TEXTS = ["the cat sat on the mat", "", "a dog", "dog", "the dog ran home fast and the cat ran home slow", "a cat"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def network(kind="Bert", dtype=torch.float32, head="Model", **options):
    """A small random network of transformers; its parameters are far from the values of initialisation."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 40, "max_position_embeddings": 16, "attn_implementation": "eager"}
    config = getattr(transformers, f"{kind}Config")(**sizes | {"pad_token_id": 0} | options)
    model = getattr(transformers, f"{kind}{head}")(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "LayerNorm.weight" in name else 0.0, 0.3)
    return model.to(dtype)


def write_folder(folder, model=None, modules=("Transformer", "Pooling", "Normalize"), pooling=None, sentence=None):
    """What sentence-transformers writes."""
    (model or network()).save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.enable_padding(length=16)  # as many files have it; it must not come through
    tokenizer.save(str(folder / "tokenizer.json"))
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    listed = [{"type": f"sentence_transformers.models.{m}", "path": paths.get(m, f"2_{m}")} for m in modules]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text(json.dumps(sentence or {"max_seq_length": 12}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode": "mean"}))
    return folder


def padded(model, texts):
    """The hidden states of each text, computed by transformers on a padded batch."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return torch.cat([hidden[i, : len(text)] for i, text in enumerate(texts)])


IDS = [[2, 5, 6, 3], [2, 3], [2, 7, 8, 3], [2, 4, 9, 10, 11, 12, 13, 3], [2, 5, 3]]


def ours(model):
    encoder = BertEncoder(BertConfig.read(model.config.to_dict()))
    encoder.load_transformers(model.state_dict())
    return encoder.to(model.dtype).eval()


WAYS = {"ours": {}, "plain": {"techniques": ()}, "reference": {"level": "reference"}}
EACH_WAY = pytest.mark.parametrize("way", WAYS)


@EACH_WAY
@pytest.mark.parametrize("runs", [True, False], ids=["runs of one length", "any lengths"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.float64, 1e-12)])
def test_hidden_states_are_those_of_transformers(dtype, tolerance, runs, way):
    model = network(dtype=dtype)
    packed = Packed.of(IDS) if runs else Packed.of(IDS)._replace(runs=())
    found = ours(model).use(**WAYS[way])(packed)
    assert found.dtype == dtype
    torch.testing.assert_close(found, padded(model, IDS), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Bert", {"hidden_act": "gelu_new"}),
        ("Bert", {"hidden_act": "relu"}),
        ("Roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
        ("XLMRoberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    ],
    ids=str,
)
def test_relatives_of_bert(kind, options):
    model = network(kind, torch.float64, **options)
    ids = [[2, 4, 5, 3], [2, 6, 3], [2, 3]]
    pad = options.get("pad_token_id", 0)
    longest = max(map(len, ids))
    batch = torch.tensor([[*text, *[pad] * (longest - len(text))] for text in ids])
    hidden = model(input_ids=batch, attention_mask=(batch != pad).long()).last_hidden_state
    expected = torch.cat([hidden[i, : len(text)] for i, text in enumerate(ids)])
    torch.testing.assert_close(ours(model)(Packed.of(ids)), expected, rtol=1e-12, atol=1e-12)
    assert ours(model).config.longest == (16 if kind == "Bert" else 14)


def test_gradients_are_those_of_transformers():
    model = network(dtype=torch.float64)
    encoder = ours(model)
    dy = torch.randn(sum(map(len, IDS)), 24, dtype=torch.float64)
    encoder(Packed.of(IDS)).backward(dy)
    padded(model, IDS).backward(dy)
    for ours_, theirs in zip(encoder.layers, model.encoder.layer, strict=True):
        joined = [getattr(theirs.attention.self, name).weight.grad for name in ("query", "key", "value")]
        torch.testing.assert_close(ours_.qkv.weight.grad, torch.cat(joined))
        torch.testing.assert_close(ours_.down.weight.grad, theirs.output.dense.weight.grad)
    torch.testing.assert_close(encoder.words.weight.grad[2:], model.embeddings.word_embeddings.weight.grad[2:])


class Products(TorchDispatchMode):
    """How many products oneDNN computed with packed weights, and how many PyTorch."""

    def __init__(self):
        super().__init__()
        self.packed = self.plain = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.packed += str(function) == "mkldnn._linear_pointwise.default"
        self.plain += function in (torch.ops.aten.addmm.default, torch.ops.aten.linear.default)
        return function(*args, **kwargs or {})


needs_packing = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this PyTorch has no such operator"
)


@needs_packing
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_packed_weights_give_the_same_numbers(activation):
    model = network(hidden_act=activation)
    encoder, packed = ours(model), Packed.of(IDS)
    with torch.no_grad(), Products() as used:
        found = encoder(packed)
    assert (used.packed, used.plain) == (8, 0)
    torch.testing.assert_close(found, padded(model, IDS), rtol=3e-5, atol=3e-5)


@needs_packing
@pytest.mark.parametrize(
    "prepare",
    [
        lambda encoder: encoder.use(techniques=()),
        lambda encoder: encoder.use(level="native"),
        lambda encoder: encoder.double(),
        lambda encoder: encoder.bfloat16(),
    ],
    ids=["plain", "level", "float64", "bfloat16"],
)
def test_weights_are_packed_for_nothing_else(prepare):
    encoder = prepare(ours(network()))
    with torch.no_grad(), Products() as used:
        encoder(Packed.of(IDS))
    assert used.packed == 0
    with Products() as used:
        ours(network())(Packed.of(IDS)).sum().backward()
    assert used.packed == 0


@needs_packing
def test_packed_weights_follow_the_weights_and_stay_out_of_copies():
    model, packed = network(), Packed.of(IDS)
    encoder = ours(model)
    with torch.no_grad():
        encoder(packed)
        copied = copy.deepcopy(encoder)
        for layer in (model.encoder.layer[0].output.dense, encoder.layers[0].down):
            layer.weight.mul_(2.0)
        torch.testing.assert_close(encoder(packed), padded(model, IDS), rtol=3e-5, atol=3e-5)
        assert not torch.allclose(copied(packed), encoder(packed), atol=1e-3)
        encoder.load_state_dict(copied.state_dict())
        torch.testing.assert_close(copied(packed), encoder(packed))
        saved = pickle.loads(pickle.dumps(encoder))
        torch.testing.assert_close(saved(packed), encoder(packed))


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_without_the_private_operator_pytorch_computes_the_same(monkeypatch, activation):
    model = network(hidden_act=activation)
    encoder, packed = ours(model), Packed.of(IDS)
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    with torch.no_grad(), Products() as used:
        found = encoder(packed)
    assert (used.packed, used.plain) == (0, 8)
    torch.testing.assert_close(found, padded(model, IDS), rtol=3e-5, atol=3e-5)


def test_it_compiles_whole_where_lengths_are_not_at_hand():
    model = ours(network(num_hidden_layers=1))
    packed = Packed.of(IDS)._replace(runs=())
    with torch.no_grad():
        found = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)(packed)
    torch.testing.assert_close(found, model(packed), rtol=1e-5, atol=1e-5)


def test_a_file_of_a_model_with_a_head_is_read(tmp_path):
    head = network(head="ForMaskedLM")
    folder = write_folder(tmp_path, head)
    found = SentenceEncoder.from_pretrained(folder, techniques=())
    torch.testing.assert_close(found.encoder(Packed.of(IDS)), padded(head.bert, IDS), rtol=3e-5, atol=3e-5)


@EACH_WAY
@pytest.mark.parametrize("tokens_per_batch", [1, 9, 1000])
def test_a_text_keeps_its_vector_alone_in_a_batch_and_in_another_order(tmp_path, tokens_per_batch, way):
    model = SentenceEncoder.from_pretrained(write_folder(tmp_path), **WAYS[way])
    vectors = model.encode(TEXTS, tokens_per_batch=tokens_per_batch)
    assert vectors.shape == (len(TEXTS), model.dimension)
    assert vectors.dtype == torch.float32
    assert vectors.isfinite().all()
    alone = torch.cat([model.encode([text]) for text in TEXTS])
    turned = model.encode(TEXTS[::-1], tokens_per_batch=tokens_per_batch).flip(0)
    for other in (alone, turned):
        assert F.cosine_similarity(vectors, other).min() > 0.999999
    assert F.cosine_similarity(vectors[0], vectors[1:]).max() < 0.999


def test_vectors_are_what_the_files_say(tmp_path):
    model = network()
    encoder = SentenceEncoder.from_pretrained(write_folder(tmp_path, model), dtype=torch.float64)
    tokens = encoder.tokenize(TEXTS)
    assert [tokens[i][:2] for i in (0, 1)] == [[2, 4], [2, 3]]
    assert max(map(len, tokens)) == 12  # cut
    hidden = padded(copy.deepcopy(model).double(), tokens).split([*map(len, tokens)])
    expected = torch.stack([text.mean(0) for text in hidden])
    assert torch.equal(encoder.encode(TEXTS, normalize=False).norm(dim=1) > 1.5, expected.norm(dim=1) > 1.5)
    torch.testing.assert_close(encoder.encode(TEXTS, normalize=False), expected)
    torch.testing.assert_close(encoder.encode(TEXTS), F.normalize(expected))


def test_texts_are_sorted_within_windows(tmp_path, monkeypatch):
    model = SentenceEncoder.from_pretrained(write_folder(tmp_path))
    expected = model.encode(TEXTS)
    monkeypatch.setattr(sentence_encoder, "WINDOW", 4)
    assert F.cosine_similarity(model.encode(TEXTS), expected).min() > 0.999999


@pytest.mark.parametrize("texts", [[[], [2, 3], []], [[]], []], ids=str)
def test_texts_without_tokens_are_zeros(tmp_path, texts):
    """A tokeniser that adds no marks makes them."""
    model = SentenceEncoder.from_pretrained(write_folder(tmp_path))
    found = model(Packed.of(texts))
    assert found.shape == (len(texts), 24)
    assert [bool(row.any()) for row in found] == [len(text) > 0 for text in texts]


def test_no_texts(tmp_path):
    assert SentenceEncoder.from_pretrained(write_folder(tmp_path)).encode([]).shape == (0, 24)


def test_lower_case_and_prompts(tmp_path):
    folder = write_folder(tmp_path, sentence={"max_seq_length": 12, "do_lower_case": True})
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "The "}, "default_prompt_name": "query"})
    )
    assert SentenceEncoder.from_pretrained(folder).tokenize(["CAT"]) == [[2, 4, 6, 3]]
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode": "mean", "include_prompt": False}))
    with pytest.raises(ValueError, match="include_prompt"):
        SentenceEncoder.from_pretrained(folder)


def test_a_file_that_is_no_json_is_named(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is no JSON: Expecting"):
        SentenceEncoder.from_pretrained(folder)


def test_batches_are_of_neighbours_in_length():
    assert batches([5, 1, 9, 2, 2], 4) == [[1, 3], [4], [0], [2]]
    assert batches([5, 1, 9, 2, 2], 5) == [[1, 3, 4], [0], [2]]
    assert batches([0, 0], 1) == [[0, 1]]
    assert batches([], 5) == []


# ---- what is not known ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": ("Transformer", "Pooling", "Dense")}, "sentence_transformers.models.Dense"),
        ({"modules": ("Transformer",)}, "known are Transformer, Pooling"),
        ({"pooling": {"pooling_mode": "median"}}, "median"),
        ({"pooling": {"pooling_mode_median_tokens": True}}, "pooling_mode_median_tokens"),
    ],
)
def test_unknown_modules_and_poolings_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        SentenceEncoder.from_pretrained(write_folder(tmp_path, **options))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "mish"),
        ("position_embedding_type", "relative_key"),
        ("model_type", "mpnet"),
        ("is_decoder", True),
    ],
)
def test_unknown_networks_are_named(tmp_path, key, value):
    folder = write_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{key}: given {value!r}"):
        SentenceEncoder.from_pretrained(folder)


def test_pickles_are_not_read(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pickle.*save_pretrained"):
        SentenceEncoder.from_pretrained(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"model.safetensors is missing"):
        SentenceEncoder.from_pretrained(folder)


@pytest.mark.parametrize("change", ["encoder.layer.1.output.dense.bias", "encoder.layer.0.attention.self.key.weight"])
def test_missing_and_unknown_weights_are_named(change):
    model = network()
    weights = model.state_dict()
    kept = weights.pop(change)
    encoder = BertEncoder(BertConfig.read(model.config.to_dict()))
    with pytest.raises(ValueError, match=f"missing are {change}"):
        encoder.load_transformers(weights)
    with pytest.raises(ValueError, match=r"unknown are another\.weight"):
        encoder.load_transformers(weights | {change: kept, "another.weight": kept})


def test_wrong_calls_are_named(tmp_path):
    model = SentenceEncoder.from_pretrained(write_folder(tmp_path))
    with pytest.raises(TypeError, match="sequence of strings"):
        model.encode("a cat")
    with pytest.raises(ValueError, match="at least 1"):
        model.encode(["a cat"], tokens_per_batch=0)
    with pytest.raises(ValueError, match="17 tokens; there are 16"):
        model.encoder(Packed.of([[2] * 17]))


# ---- the real thing ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def minilm():
    try:
        return _model_folder()
    except RealInputUnavailable as error:
        pytest.skip(str(error))


def test_a_published_model_gives_the_published_vectors(minilm):
    texts = [*real_text(6), "", "A short one."]
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm, local_files_only=True)
    network = transformers.AutoModel.from_pretrained(minilm, local_files_only=True).eval()
    batch = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    mask = batch["attention_mask"][..., None]
    with torch.inference_mode():
        expected = F.normalize((network(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    model = SentenceEncoder.from_pretrained(minilm)
    assert model.max_seq_length == 256
    vectors = model.encode(texts)
    assert F.cosine_similarity(vectors, expected).min() > 0.999999
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(texts)))
    assert F.cosine_similarity(vectors[0], vectors[-1], dim=0) < 0.9
    assert F.cosine_similarity(model.encode(texts[3:4])[0], vectors[3], dim=0) > 0.999999
