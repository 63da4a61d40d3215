"""The choice of techniques: each computes what plain PyTorch computes, at every level that is asked for."""

import copy

import pytest
import torch

from kernel_pytorch.models import ALL, LanguageModel, Techniques, TransformerBlock
from kernel_pytorch.models.block import FeedForward
from kernel_pytorch.qkv_fusion import RotaryTable

KINDS = {
    "llama": {"num_kv_heads": 2, "rotary": RotaryTable(8)},
    "vit": {"norm": "layer", "mlp": "gelu", "bias": True, "causal": False},
    "wide heads": {"norm": "layer", "head_dim": 16, "activation": "gelu_tanh"},
    "relu": {"mlp": "gelu", "activation": "relu", "hidden_dim": 40, "num_kv_heads": 1},
}


def block(kind="llama", **options):
    torch.manual_seed(0)
    made = TransformerBlock(32, 4, **KINDS[kind], **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def results(module, x, **arguments):
    """The output, and the gradients of x and of all parameters."""
    module, x = copy.deepcopy(module), x.detach().clone().requires_grad_()
    y = module(x, **arguments)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return {"y": y, "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("level", [None, "native", "reference"])
def test_all_techniques_compute_the_plain_block(kind, dtype, level):
    module = block(kind).to(dtype)
    x = torch.randn(2, 5, 32, dtype=dtype)
    plain = results(module.use(techniques=()), x)
    ours = results(module.use(level=level), x)
    torch.testing.assert_close(ours, plain, **({} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 2e-5}))


@pytest.mark.parametrize("technique", ALL)
def test_each_technique_alone(technique):
    module, x = block().double(), torch.randn(2, 5, 32, dtype=torch.float64)
    plain = results(module.use(techniques=()), x)
    torch.testing.assert_close(results(module.use(techniques=[technique], level="reference"), x), plain)


@pytest.mark.parametrize("techniques", [(), None])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("level", [None, "native"])
def test_packed_sequences_do_not_see_each_other(techniques, causal, level):
    """Also empty ones, and one of a single token."""
    module = block(causal=causal).double() if not causal else block().double()
    module.attention.causal = causal
    module.use(techniques, level)
    lengths = [3, 0, 1, 6, 0]
    x = torch.randn(sum(lengths), 32, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    rotation = RotaryTable(8)(torch.cat([torch.arange(n) for n in lengths]))
    packed = module(x, rotation=rotation, cu_seqlens=cu_seqlens)
    alone = torch.cat([module(part[None])[0] for part in x.split(lengths) if len(part)])
    torch.testing.assert_close(packed, alone)
    some = module(x, rotation=rotation, cu_seqlens=cu_seqlens, max_seqlen=6)
    torch.testing.assert_close(some, packed, rtol=0, atol=0)


@pytest.mark.parametrize("techniques", [(), None])
def test_a_token_that_sees_no_key_gets_zeros(techniques):
    module = block("vit", techniques=techniques)
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    mask[0, :, 1] = False
    mask[1, :, :, 2:] = False  # padding
    x = torch.randn(2, 4, 32)
    y = module.attention(x, mask=mask)
    torch.testing.assert_close(y[0, 1], module.attention.out.bias)
    torch.testing.assert_close(y[1:], module.attention(x[1:], mask=mask[1:]))
    changed = x.clone()
    changed[1, 2:] = 7.0
    torch.testing.assert_close(module.attention(changed, mask=mask)[1, :2], y[1, :2])
    assert y.isfinite().all()


def test_a_mask_beside_causal():
    module = block()
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask[..., 0] = False
    x = torch.randn(1, 4, 32)
    first = module.use(techniques=())(x, mask=mask)
    torch.testing.assert_close(module.use()(x, mask=mask), first)
    torch.testing.assert_close(first[:, :3], module(x[:, :3], mask=mask[..., :3, :3]))


def test_the_sum_is_left_to_the_next_norm():
    module, x = block(), torch.randn(2, 5, 32)
    stream, update = module(x, defer=True)
    torch.testing.assert_close(stream + update, module(x))
    torch.testing.assert_close(module(stream, update), module(module(x)))


@pytest.mark.parametrize("kind", ["llama", "vit"])
@pytest.mark.parametrize("techniques", [(), None])
def test_compiles_as_one_graph(kind, techniques):
    """Traced and differentiated as by TorchInductor, whose C++ compiler takes seconds and shows nothing of ours."""
    module, x = block(kind, techniques=techniques), torch.randn(2, 5, 32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=2e-5)


def test_what_is_compiled_for_a_cpu_consists_of_operators_that_can_be_fused():
    pytest.importorskip("kernel_pytorch.cuda_ops")  # whose kernels for a CPU are defaults in eager mode
    graphs = []
    module, x = block().requires_grad_(False), torch.randn(2, 5, 32)
    for level in (None, "cuda"):
        module.use(["rmsnorm", "qkv-fusion", "fused-ln-act"], level)
        torch.compile(module, fullgraph=True, backend=lambda graph, _: graphs.append(str(graph.graph)) or graph)(x)
        torch._dynamo.reset()
    assert ["kernel_pytorch" in graph for graph in graphs] == [False, True]


def test_only_logits_of_many_words_are_worth_a_loss_without_them(monkeypatch):
    chosen = Techniques.of(["linear-cross-entropy"], None)
    x, targets = torch.randn(5, 8), torch.tensor([1, 0, 3, -100, 2])
    expected = torch.nn.functional.cross_entropy(x @ x[:4].T, targets)
    torch.testing.assert_close(chosen.linear_cross_entropy(x, x[:4], targets), expected)
    monkeypatch.setattr("kernel_pytorch.linear_cross_entropy.linear_cross_entropy", lambda *_, level: level)
    for words, found in ((33, None), (32, torch.Tensor)):
        loss = chosen.linear_cross_entropy(x, torch.randn(words, 8), targets)
        assert loss is None if found is None else isinstance(loss, found)
    assert Techniques.of(None, "native").linear_cross_entropy(x, x[:4], targets) == "native"


@pytest.mark.parametrize("techniques", [(), None])
def test_exports(techniques):
    module, x = block(techniques=techniques).eval(), torch.randn(2, 5, 32)
    program = torch.export.export(module, (x,))
    torch.testing.assert_close(program.module()(x), module(x))


def test_triton_kernels_compute_the_same_model():
    torch.manual_seed(0)
    model = LanguageModel(40, 32, num_layers=1, num_heads=2, num_kv_heads=1, hidden_dim=32, techniques=())
    tokens = torch.randint(40, (1, 6))
    plain = model(tokens[:, :-1], targets=tokens[:, 1:])
    expected = torch.autograd.grad(plain, list(model.parameters()))
    loss = model.use(level="triton")(tokens[:, :-1], targets=tokens[:, 1:])
    torch.testing.assert_close(loss, plain)
    found = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_use_reaches_every_module_and_survives_deepcopy():
    model = LanguageModel(40, 32, num_layers=2, num_heads=2)
    assert {m.techniques for m in model.modules() if hasattr(m, "techniques")} == {Techniques(frozenset(ALL))}
    assert model.use(techniques=["rmsnorm"], level="native") is model
    copied = copy.deepcopy(model)
    wanted = Techniques(frozenset({"rmsnorm"}), "native")
    assert {m.techniques for m in copied.modules() if hasattr(m, "techniques")} == {wanted}
    assert "techniques=('rmsnorm',), level='native'" in repr(copied)


def test_the_level_reaches_the_functions():
    tanh = FeedForward(32, 64, activation="gelu_tanh", techniques=["fused-ln-act"], level="cuda")
    with pytest.raises(ValueError, match="'cuda' of gated_mlp does not exist"):
        tanh(torch.randn(2, 32))


@pytest.mark.parametrize("mlp", ["gated", "gelu"])
def test_feed_forwards_have_a_level_cuda_though_their_products_have_none(mlp):
    pytest.importorskip("kernel_pytorch.cuda_ops")
    model, x = block(mlp=mlp, techniques=()), torch.randn(2, 5, 32)
    torch.testing.assert_close(copy.deepcopy(model).use(["fused-ln-act"], "cuda")(x), model(x))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"techniques": "rmsnorm"}, TypeError, "techniques: given the string 'rmsnorm'; it must be a sequence"),
        (
            {"techniques": ["rmsnorm", "nothing"]},
            ValueError,
            "techniques: given nothing; allowed are flash-attn-triton",
        ),
        ({"level": "fast"}, ValueError, "level: given 'fast'; allowed are None, reference"),
        ({"norm": "batch"}, ValueError, "norm: given 'batch'; allowed are rms, layer"),
        ({"mlp": "deep"}, ValueError, "mlp: given 'deep'; allowed are gated, gelu"),
        ({"activation": "swish"}, ValueError, "activation: given 'swish'; allowed are gelu"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads: given 3; it must divide num_heads, 4"),
        ({"dim": 30}, ValueError, "head_dim: given None; dim 30 is no multiple of num_heads, 4"),
    ],
)
def test_wrong_arguments_are_named(given, error, message):
    with pytest.raises(error, match=message):
        TransformerBlock(**{"dim": 32, "num_heads": 4} | given)


def test_a_wrong_choice_changes_nothing():
    module = block()
    with pytest.raises(ValueError, match="techniques: given nothing"):
        module.use(["nothing"])
    assert module.techniques == Techniques(frozenset(ALL))
