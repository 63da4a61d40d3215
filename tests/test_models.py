"""Patches of all packages in models of Hugging Face's transformers, small and with random weights."""

import copy
import functools
import inspect
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.models import losses
from kernel_pytorch.harness.models.variants import VARIANTS
from kernel_pytorch.harness.models.works import enable_checkpointing, find_work
from kernel_pytorch.harness.models.zoo import MODELS, find_model
from kernel_pytorch.linear_cross_entropy import replacements
from kernel_pytorch.qkv_fusion import rotation
from kernel_pytorch.rmsnorm._core.stock import owner_of

transformers = pytest.importorskip("transformers")
PATCHES = [t for t in discover().techniques.values() if t.replacements]
NAMES = [model.name for model in MODELS]

REPLACED = {
    "llama": {"fused-decode": 1, "rmsnorm": 7, "fused-ln-act": 2, "linear-cross-entropy": 1, "qkv-fusion": 2},
    "qwen3": {"fused-decode": 1, "rmsnorm": 11, "fused-ln-act": 2, "linear-cross-entropy": 1, "qkv-fusion": 2},
    "gemma2": {
        "fused-decode": 1,
        "rmsnorm": 9,
        "fused-ln-act": 2,
        "linear-cross-entropy": 1,
        "qkv-fusion": 2,
        "flash-attn-triton": 2,
    },
    "gpt2": {"fused-ln-act": 7, "linear-cross-entropy": 1},
    "bert": {"fused-ln-act": 10, "linear-cross-entropy": 1},
    "vit": {"fused-ln-act": 5},
}


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """Let the functions of the packages compute on a CPU too, where patched modules run their classes' own forward."""
    for technique in PATCHES:
        monkeypatch.setattr(technique.ladder(), "is_native", lambda function, x: False)


def small(name):
    """A model without dropout, and a batch."""
    torch.manual_seed(0)
    spec = find_model(name).as_tiny()
    model = spec.build().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model, spec.inputs(find_work("training").shape(spec), torch.device("cpu"))


def patched(model, order=PATCHES):
    model = copy.deepcopy(model)
    for technique in order:
        technique.patch(model, gpu_bound=True)
    return model


def loss_and_gradients(model, inputs):
    loss = model(**inputs).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), found


def logits(model, inputs):
    with torch.no_grad():
        return model.eval()(**{k: v for k, v in inputs.items() if k != "labels"}).logits


@pytest.mark.parametrize("name", NAMES)
def test_the_same_loss_gradients_and_logits(name):
    model, inputs = small(name)
    ours, replaced = copy.deepcopy(model), {}
    for technique in PATCHES:
        if count := len(technique.patch(ours, gpu_bound=True).replaced):
            replaced[technique.name] = count
    assert replaced == REPLACED[name]
    (loss, gradients), (expected, others) = loss_and_gradients(ours, inputs), loss_and_gradients(model, inputs)
    torch.testing.assert_close(loss, expected)
    assert gradients.keys() == others.keys()
    for path, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[path], rtol=1e-4, atol=1e-6, msg=path)
    torch.testing.assert_close(logits(ours, inputs), logits(model, inputs))


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n != "llama")])
def test_patches_come_off_bitwise_in_any_order(name):
    model, inputs = small(name)
    expected = logits(copy.deepcopy(model), inputs)
    for order in itertools.islice(itertools.permutations(PATCHES), 0, None, 41):  # each before and after each other
        ours = patched(model, order)
        for technique in reversed(order[1:] + order[:1]):
            technique.unpatch(ours)
        assert torch.equal(logits(ours, inputs), expected)
        assert all("forward" not in vars(module) for module in ours.modules())


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_go_both_ways(name):
    model, _ = small(name)
    ours = patched(model)
    assert list(ours.state_dict()) == list(model.state_dict())
    model.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_signature_is_the_class_s(name):
    """transformers reads it: `generate` passes positions by it, `Trainer` keeps columns of the data by it."""
    model, _ = small(name)
    assert inspect.signature(patched(model).forward) == inspect.signature(model.forward)


def arrangement(model):
    """What decides how a model computes: whose forward each module runs, and which attention."""
    return {path: owner_of(m) for path, m in model.named_modules()}, model.config._attn_implementation


@pytest.mark.parametrize("name", NAMES)
def test_the_column_of_ours_compiled_measures_the_lines_of_the_page(name):
    page = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
    block = next(b for b in re.findall(r"```python\n(.*?)```", page, re.S) if "torch.compile(model)" in b)
    code, count = re.subn(r"(?m)^model = .*\n", "", block)
    assert count == 1
    model, _ = small(name)
    spec, work, documented = find_model(name), find_work("training"), {"model": copy.deepcopy(model)}
    exec(code, documented)
    variant = next(each for each in VARIANTS if each.name == "ours-compiled")
    measured, _ = variant.prepare(spec, work, copy.deepcopy(model), PATCHES)
    assert arrangement(measured._orig_mod) == arrangement(documented["compiled"]._orig_mod)
    assert set(arrangement(model)[0].values()) == {None}
    changed, _ = replace(variant, causal=True).prepare(spec, work, copy.deepcopy(model), PATCHES)
    assert arrangement(changed._orig_mod) != arrangement(measured._orig_mod)


def test_gemma_2_is_measured_with_its_soft_cap():
    assert find_model("gemma2").as_tiny().build().config._attn_implementation == "eager"


def test_logits_are_none_in_training_alone():
    model, inputs = small("llama")
    ours = patched(model)
    assert ours(**inputs).logits is None
    assert ours.eval()(**inputs).logits is not None
    torch.testing.assert_close(ours(**inputs).loss, model.eval()(**inputs).loss)


def test_logits_that_are_faster_rounded_are_the_model_s():
    """In bfloat16 on a CPU no product adds up to float32; float16 there is slower than float32."""
    model, inputs = small("llama")
    ours = patched(model)
    for dtype, is_stock in ((torch.bfloat16, True), (torch.float16, False)):
        with torch.autocast("cpu", dtype):
            found, expected = ours(**inputs), model(**inputs)
        assert (found.logits is not None) == is_stock
        torch.testing.assert_close(found.loss, expected.loss, rtol=2e-3, atol=0.0)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert ours(**inputs).logits is None
    assert ours.bfloat16()(**inputs).logits is not None


def test_the_loss_over_a_number_of_words_that_is_given():
    """As transformers' Trainer accumulates gradients."""
    model, inputs = small("llama")
    ours = patched(model)
    items = torch.tensor(37)
    torch.testing.assert_close(
        ours(**inputs, num_items_in_batch=items).loss, model(**inputs, num_items_in_batch=items).loss
    )


def test_what_is_not_transformers_own_loss_is_the_model_s():
    model, inputs = small("llama")
    ours = patched(model)
    for each in (model, ours):
        each.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    torch.testing.assert_close(ours(**inputs).loss, model(**inputs).loss)


def test_keywords_of_the_loss_and_of_the_logits():
    model, inputs = small("llama")
    ours = patched(model)
    for more in ({"ignore_index": 0}, {"logits_to_keep": torch.arange(64)}, {"return_dict": False}):
        a, b = (each(**inputs, **more) for each in (ours, model))
        torch.testing.assert_close(a[0], b[0])


def test_a_hook_on_the_head_is_called():
    model, inputs = small("llama")
    ours, seen = patched(model), []
    ours.lm_head.register_forward_hook(lambda *given: seen.append(1))
    ours(**inputs)
    assert seen


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_head_whose_forward_was_replaced_is_called(name, before):
    """As offloading and adapters replace it, on the module itself."""
    model, inputs = small(name)
    ours = copy.deepcopy(model) if before else patched(model)
    for each in (model, ours):
        head = each.get_output_embeddings()
        head.forward = functools.partial(lambda own, x: own(x) * 3.0, head.forward)
    ours = patched(ours) if before else ours
    torch.testing.assert_close(ours(**inputs).loss, model(**inputs).loss)


def test_tables_with_gradients_and_of_another_dtype():
    own = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    rotate = rotation._rotation(own)
    q, k, scale = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.ones((), requires_grad=True)
    cos, sin = torch.rand(1, 5, 8).repeat(1, 1, 2) * scale, torch.rand(1, 5, 8).repeat(1, 1, 2) * scale
    assert torch.autograd.grad(rotate(q, k, cos, sin)[0].sum(), scale)[0] != 0.0
    cos, sin = cos.detach(), sin.detach()
    assert rotate(q.bfloat16(), k.bfloat16(), cos, sin)[0].dtype == own(q.bfloat16(), k.bfloat16(), cos, sin)[0].dtype
    torch.testing.assert_close(rotate(q, k, cos[:, :1], sin[:, :1]), own(q, k, cos[:, :1], sin[:, :1]))


def test_with_activation_checkpointing():
    model, inputs = small("qwen3")
    ours = patched(model)
    for each in (model, ours):
        enable_checkpointing(each)
    for a, b in zip(
        loss_and_gradients(ours, inputs)[1].values(), loss_and_gradients(model, inputs)[1].values(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_adapters_go_on_working():
    """As LoRA: a module in the place of a linear layer, which calls it and adds to it."""

    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.low = base, torch.nn.Linear(base.in_features, base.out_features, bias=False)

        def forward(self, x):
            return self.base(x) + self.low(x)

    model, inputs = small("llama")
    for layer in model.model.layers:
        layer.mlp.gate_proj, layer.self_attn.q_proj = Adapter(layer.mlp.gate_proj), Adapter(layer.self_attn.q_proj)
    ours = patched(model)
    loss, gradients = loss_and_gradients(ours, inputs)
    expected, others = loss_and_gradients(model, inputs)
    torch.testing.assert_close(loss, expected)
    assert any("low" in path for path in gradients)
    for path, gradient in gradients.items():
        torch.testing.assert_close(gradient, others[path], rtol=1e-4, atol=1e-6, msg=path)


@pytest.fixture
def alone(tmp_path):
    """A process group of one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard], ids=["DDP", "FSDP2"])
def test_under_data_parallelism(wrap, alone):
    model, inputs = small("llama")
    expected = loss_and_gradients(model, inputs)
    ours = wrap(patched(model))
    loss, gradients = loss_and_gradients(ours, inputs)
    torch.testing.assert_close(loss, expected[0])
    for path, gradient in gradients.items():
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        torch.testing.assert_close(whole, expected[1][path.removeprefix("module.")], rtol=1e-4, atol=1e-6, msg=path)


def in_training(model):
    """What is replaced, but for generation, which reads parameters that would have to be gathered."""
    found = [technique.patch(model).replaced for technique in PATCHES]
    return [{path: by for path, by in each.items() if not by.endswith("in generate")} for each in found]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_after_fully_shard_the_same_is_replaced(name, alone):
    model, inputs = small(name)
    expected = loss_and_gradients(patched(model), inputs)[0]
    before = in_training(copy.deepcopy(model))
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList):
            for layer in module:
                fully_shard(layer)
    fully_shard(model)
    assert in_training(model) == before
    torch.testing.assert_close(loss_and_gradients(model, inputs)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_compiled_as_one_graph(name):
    model, inputs = small(name)
    ours = torch.compile(patched(model), fullgraph=True)
    (loss, gradients), expected = loss_and_gradients(ours, inputs), loss_and_gradients(model, inputs)
    torch.testing.assert_close(loss, expected[0])
    for path, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[1][path.removeprefix("_orig_mod.")], rtol=1e-3, atol=1e-5, msg=path
        )


def test_what_is_not_known_is_left_alone_with_the_reason():
    model, _ = small("llama")

    class OtherForCausalLM(type(model)):
        pass

    model.__class__ = OtherForCausalLM
    reports = {t.name: t.patch(model, gpu_bound=True) for t in PATCHES}
    assert reports["linear-cross-entropy"].left == {"": "it is not known what the head of OtherForCausalLM computes"}


@pytest.mark.parametrize("name", NAMES)
def test_the_losses_of_twenty_steps_in_float32_are_those_of_stock(name):
    found = losses.compare_losses(find_model(name).as_tiny(), PATCHES, torch.device("cpu"))
    assert (found.dtype, len(found.stock), found.allowed) == ("float32", 20, 1e-4)
    assert found.stock[-1] < 0.999 * found.stock[0], "it learns nothing"
    assert found.difference < 1e-4


@pytest.mark.slow
def test_in_16_bits_no_farther_from_float32_than_stock(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(losses, "prepare", lambda work, model, device: model.to(torch.bfloat16).train())
    monkeypatch.setattr(replacements, "_is_faster_rounded", lambda head: False)
    found = losses.compare_losses(find_model("llama").as_tiny(), PATCHES, torch.device("cpu"))
    assert (found.dtype, len(found.exact)) == ("bfloat16", 20)
    assert 0.0 < found.difference < 0.01
    assert 0.0 < found.held <= found.allowed < 0.01


def test_only_what_looks_like_a_head_is_called_one():
    """In T5's attention a layer and the table of relative positions may have as many rows."""

    class Speaker(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.speak = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)

    config = transformers.T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=1, num_heads=4, vocab_size=61)
    model = torch.nn.ModuleDict({"t5": transformers.T5Model(config), "own": Speaker()})
    left = replacements.patch(model).left
    assert [path for path, why in left.items() if "from what its" in why] == ["own"]
