"""Patched models as people prepare and carry them: default devices, meta, pickles, offloading, adapters."""

import copy
import io
import multiprocessing
import pickle
import subprocess
import sys
import warnings

import pytest
import torch

from kernel_pytorch.fused_ln_act import replacements as fused
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.linear_cross_entropy import replacements as losses

transformers = pytest.importorskip("transformers")
PATCHES = [t for t in discover().techniques.values() if t.replacements]
BY_NAME = {t.name: t for t in PATCHES}
SIZES = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0, "d_model": 16,
    "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "num_local_experts": 2, "num_mel_bins": 8,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "bos_token_id": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 16, "eos_token_id": 2,
    "n_embd": 16, "n_head": 2, "n_layer": 1, "intermediate_size_mlp": 24, "decoder_start_token_id": 1,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """Let the functions of the packages compute on a CPU too, where patched modules run their classes' own forward."""
    for technique in PATCHES:
        monkeypatch.setattr(technique.ladder(), "is_native", lambda function, x: False)


def tiny(name, **more):
    """A model of transformers by the name of its class, small and with random weights."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    default = kind.config_class()
    given = {key: value for key, value in SIZES.items() if hasattr(default, key)}
    return kind(kind.config_class(**given, **more)).train()


def patched(model):
    model = copy.deepcopy(model)
    replaced = [len(technique.patch(model, gpu_bound=True).replaced) for technique in PATCHES]
    assert any(replaced)
    return model


def is_patched(model):
    return any(
        any(technique.name == owner for technique in PATCHES)
        for module in model.modules()
        if (owner := getattr(vars(module).get("forward"), "_kernel_pytorch_package", ("",))[0])
    )


def ids(**more):
    return torch.arange(3, 23, **more).view(2, 10)


def loss_of(model, **more):
    x = ids(device=next(model.parameters()).device)
    return model(input_ids=x, labels=x, **more)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "BertForMaskedLM"])
@pytest.mark.parametrize("technique", PATCHES, ids=lambda t: t.name)
def test_a_default_device_changes_nothing(technique, kind):
    model = tiny(kind)
    expected = technique.patch(copy.deepcopy(model), gpu_bound=True)
    with torch.device("meta"):
        found = technique.patch(model, gpu_bound=True)
    assert (found.replaced, found.left) == (expected.replaced, expected.left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "BertForMaskedLM", "GPT2LMHeadModel"])
def test_on_the_meta_device(kind, dtype):
    """People plan memory and count operations there."""
    model = tiny(kind).to("meta", dtype)
    model.config.pad_token_id = None  # of which transformers would look for its value in the input
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            found, expected = loss_of(patched(model)).loss, loss_of(model).loss
        assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "BertForMaskedLM"])
def test_weights_that_are_assigned_after_meta(kind):
    model = tiny(kind)
    ours = patched(copy.deepcopy(model).to("meta"))
    ours.load_state_dict(model.state_dict(), assign=True)
    for name, buffer in model.named_buffers():  # not all are in a state_dict
        path, _, last = name.rpartition(".")
        setattr(ours.get_submodule(path), last, buffer)
    ours.tie_weights()
    torch.testing.assert_close(loss_of(ours).loss, loss_of(model).loss)


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "BertForMaskedLM", "GPT2LMHeadModel"])
def test_pickles_come_back_as_documented(kind):
    """As by torch.save, and in workers that are spawned: unpatched; a deep copy is patched."""
    model = tiny(kind)
    ours, expected, buffer = patched(model), loss_of(model).loss, io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for other in (pickle.loads(pickle.dumps(ours)), torch.load(buffer, weights_only=False)):
        assert not is_patched(other)
        assert torch.equal(loss_of(other).loss, expected)
    other = copy.deepcopy(ours)
    assert is_patched(other)
    assert torch.equal(loss_of(other).loss, loss_of(ours).loss)


def _work(model, queue):
    queue.put((is_patched(model), loss_of(model).loss.item()))


@pytest.mark.slow
def test_a_spawned_worker_gets_the_classes_own_forward():
    model = tiny("LlamaForCausalLM")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_work, args=(patched(model), queue))
    process.start()
    found = queue.get(timeout=120)
    process.join()
    assert found == (False, pytest.approx(loss_of(model).loss.item()))


LOAD = "import pickle, sys; model = pickle.load(sys.stdin.buffer).eval(); x = __import__('torch').arange(3, 23)[None]; "
RUN = "print('forward' in vars(model.get_submodule(sys.argv[1])), model(input_ids=x).logits.double().sum().item())"


@pytest.mark.parametrize(
    ("kind", "path"), [("LlamaForCausalLM", "model.layers.0.mlp"), ("BertForMaskedLM", "bert.encoder.layer.0.output")]
)
def test_cloudpickle_carries_patches(kind, path):
    """As Ray, Dask, joblib and MLflow do, here into another process."""
    cloudpickle = pytest.importorskip("cloudpickle")
    model = tiny(kind)
    ours = patched(model)
    carried = cloudpickle.dumps(ours)
    other = pickle.loads(carried)
    assert is_patched(other)
    torch.testing.assert_close(loss_of(other).loss, loss_of(model).loss)
    for technique in PATCHES:
        technique.unpatch(other)
    assert not is_patched(other)
    found = subprocess.run([sys.executable, "-c", LOAD + RUN, path], input=carried, capture_output=True, check=False)
    assert found.returncode == 0, found.stderr.decode()
    is_there, total = found.stdout.split()
    assert is_there == b"True"
    x = torch.arange(3, 23)[None]
    assert float(total) == pytest.approx(model.eval()(input_ids=x).logits.double().sum().item(), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "configured"),  # transformers' Llama and GPT-2 fail with such a configuration
    [("LlamaForCausalLM", True), ("GPT2LMHeadModel", True), ("BertForMaskedLM", True), ("BertForMaskedLM", False)],
)
@pytest.mark.parametrize("given", [{}, {"return_dict": None}, {"return_dict": True}, {"return_dict": False}], ids=str)
def test_return_dict_in_configuration_and_call(kind, given, configured):
    model = tiny(kind, return_dict=configured)
    found, expected = loss_of(patched(model), **given), loss_of(model, **given)
    assert type(found) is type(expected)
    torch.testing.assert_close(found[0], expected[0])
    assert len(found) == len(expected) - (not isinstance(expected, tuple))  # logits


@pytest.mark.parametrize("items", [None, 37, torch.tensor(37)], ids=["none", "int", "tensor"])
@pytest.mark.parametrize("kind", sorted({**losses.CAUSAL, **losses.MASKED}))
def test_the_number_of_items_in_a_batch(kind, items):
    """transformers' Trainer passes it where it accumulates gradients; some losses take it, and others do not."""
    model = tiny(kind)
    more = {} if items is None else {"num_items_in_batch": items}
    ours = copy.deepcopy(model)
    assert losses.patch(ours).replaced
    found, expected = loss_of(ours, **more), loss_of(model, **more)
    assert found.logits is None
    torch.testing.assert_close(found.loss, expected.loss)


class Hooked:
    """Something that wants to know of a child, put on it after the model was patched."""

    def __init__(self):
        self.seen = []

    def __call__(self, *given):
        self.seen.append(given)


def _hooks(module, hook):
    return {
        "forward": lambda: module.register_forward_hook(hook),
        "forward_pre": lambda: module.register_forward_pre_hook(hook),
        "backward": lambda: module.register_full_backward_hook(hook),
        "backward_pre": lambda: module.register_full_backward_pre_hook(hook),
        "of all modules": lambda: torch.nn.modules.module.register_module_forward_hook(hook),
    }


WHERE = ["forward", "forward_pre", "backward", "backward_pre", "of all modules"]
CHILDREN = [
    ("LlamaForCausalLM", "model.layers.0.mlp.act_fn"),
    ("LlamaForCausalLM", "model.layers.0.post_attention_layernorm"),
    ("LlamaForCausalLM", "lm_head"),
    ("BertForMaskedLM", "bert.encoder.layer.0.output.LayerNorm"),
    ("BertForMaskedLM", "bert.encoder.layer.0.output.dropout"),
    ("BertForMaskedLM", "cls.predictions"),
    ("BertForMaskedLM", "cls.predictions.decoder"),
    ("GPT2LMHeadModel", "transformer.h.0.mlp.act"),
]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("kind", "path"), CHILDREN, ids=lambda each: each.rpartition(".")[2])
def test_hooks_on_every_child_are_called(kind, path, where):
    """Whatever a patched parent computes itself: with hooks on the child its class's own forward runs."""
    model, hook = patched(tiny(kind)), Hooked()
    child = model.get_submodule(path)
    handle = _hooks(child, hook)[where]()
    try:
        loss_of(model).loss.backward()
    finally:
        handle.remove()
    assert any(given[0] is child for given in hook.seen)


@pytest.mark.parametrize(("kind", "path"), CHILDREN, ids=lambda each: each.rpartition(".")[2])
def test_a_forward_that_was_replaced_is_called(kind, path):
    """As offloading, quantisation and adapters replace it."""
    ours, seen = patched(tiny(kind)), Hooked()
    child = ours.get_submodule(path)
    own = child.forward
    child.forward = lambda *given, **keywords: seen(given) or own(*given, **keywords)
    loss_of(ours)
    assert seen.seen


def test_patch_calls_no_hook():
    model, seen = tiny("LlamaForCausalLM"), Hooked()
    handles = [module.register_forward_hook(seen) for module in model.modules()]
    handles.append(torch.nn.modules.module.register_module_forward_pre_hook(seen))
    try:
        for technique in PATCHES:
            technique.patch(model, gpu_bound=True)
    finally:
        for handle in handles:
            handle.remove()
    assert not seen.seen


def test_an_activation_that_was_changed_is_the_class_s():
    """Its class may be the same."""
    mlp = tiny("LlamaForCausalLM").model.layers[0].mlp
    mlp.act_fn = torch.nn.GELU()
    assert fused.patch(mlp).replaced
    x = 50.0 * torch.randn(50, 16)
    for act in (torch.nn.GELU("tanh"), torch.nn.GELU(), torch.nn.Sequential(torch.nn.Tanh())):
        mlp.act_fn = act
        # The kinds of GELU are 5e-4 apart; level cuda, the default of float32 on a CPU, rounds in another way.
        torch.testing.assert_close(mlp(x), type(mlp).forward(mlp, x), rtol=1e-5, atol=2e-6)


LEFT = {
    "T5ForConditionalGeneration": {
        "fused-ln-act": ["encoder.block.0.layer.1.DenseReluDense", "decoder.block.0.layer.2.DenseReluDense"],
        "flash-attn-triton": ["encoder.block.0.layer.0.SelfAttention"], "linear-cross-entropy": [""],
    },
    "WhisperForConditionalGeneration": {
        "fused-ln-act": ["model.encoder.layers.0", "model.decoder.layers.0"],
        "flash-attn-triton": ["model.decoder.layers.0.encoder_attn"], "linear-cross-entropy": [""],
    },
    "BartForConditionalGeneration": {
        "fused-ln-act": ["model.encoder.layers.0", "model.decoder.layers.0"],
        "flash-attn-triton": ["model.encoder.layers.0.self_attn"], "linear-cross-entropy": [""],
    },
    "Phi3ForCausalLM": {"fused-ln-act": ["model.layers.0.mlp"], "rmsnorm": ["model.layers.0"]},
    "MixtralForCausalLM": {"fused-ln-act": ["model.layers.0.mlp.experts"], "linear-cross-entropy": [""]},
    "Llama4ForCausalLM": {"qkv-fusion": ["model.layers.0.self_attn"]},
}  # fmt: skip


@pytest.mark.parametrize("kind", LEFT)
def test_the_report_names_what_is_left_alone(kind):
    model = tiny(kind)
    for name, paths in LEFT[kind].items():
        report = BY_NAME[name].patch(model, gpu_bound=True)
        assert not [path for path in paths if not report.left.get(path)]
        assert not report.left.keys() & report.replaced.keys()


class Words(torch.nn.Module):
    """A language model that somebody wrote."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = (
            torch.nn.Embedding(61, 16),
            torch.nn.Linear(16, 16),
            torch.nn.Linear(16, 61),
        )

    def forward(self, x):
        return self.head(self.body(self.embedding(x)))


def test_the_head_of_a_model_that_somebody_wrote_is_named():
    assert list(losses.patch(torch.nn.Sequential(Words())).left) == ["0"]


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "BertForMaskedLM"])
def test_a_model_that_accelerate_offloads(kind):
    accelerate = pytest.importorskip("accelerate")
    model = tiny(kind)
    ours = patched(model)
    accelerate.cpu_offload(ours, execution_device=torch.device("cpu"))
    x = ids()
    stock = model(input_ids=x, labels=x).loss
    torch.testing.assert_close(ours(input_ids=x, labels=x).loss, stock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for technique in PATCHES:
            technique.unpatch(ours)
    assert torch.equal(ours(input_ids=x, labels=x).loss, stock)
    accelerate.hooks.remove_hook_from_submodules(ours)
    assert not is_patched(ours)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of a name that peft uses
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "Llama4ForCausalLM"])
def test_adapters_of_peft(kind):
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"])
    model, found = tiny(kind), {}
    for name, each in (("stock", model), ("ours", patched(model))):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(copy.deepcopy(each), adapters)
        loss_of(adapted).loss.backward()
        found[name] = {path: p.grad for path, p in adapted.named_parameters() if p.grad is not None}
    assert found["ours"]
    torch.testing.assert_close(found["ours"], found["stock"], rtol=1e-4, atol=1e-6)
