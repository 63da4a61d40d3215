"""`fuse` and `unfuse`: parameters bit for bit, checkpoints both ways, training, models of transformers, refusals."""

import copy
import pickle

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from kernel_pytorch.qkv_fusion import LinearGroup
from kernel_pytorch.qkv_fusion.replacements import fuse, unfuse


class Attention(torch.nn.Module):
    """The layers of an attention, under names of choice, in an order of choice."""

    def __init__(self, names=("q_proj", "k_proj", "v_proj"), out="o_proj", bias=False, channels=16, heads=(4, 2, 2)):
        super().__init__()
        for name, count in zip(names, heads, strict=True):
            self.add_module(name, torch.nn.Linear(channels, count * 4, bias))
        self.names, self.out = names, out
        self.add_module(out, torch.nn.Linear(heads[0] * 4, channels))

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        q, k, v = (
            getattr(self, n)(m).unflatten(-1, (-1, 4)).transpose(1, 2)
            for n, m in zip(self.names, (x, memory, memory), strict=True)
        )
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return getattr(self, self.out)(y.transpose(1, 2).flatten(-2))


class Block(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = Attention(**options)
        self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(*s) for s in ((16, 24), (16, 24), (24, 16)))

    def forward(self, x):
        h = x + self.attention(x)
        return h + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


def model(layers=2, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[Block(**options) for _ in range(layers)]).to(dtype)


NAMINGS = {
    "Llama": {},
    "Qwen2": {"bias": True},
    "BERT": {"names": ("query", "key", "value"), "out": "dense", "bias": True, "heads": (4, 4, 4)},
}


def same_bits(state, other):
    assert list(state) == list(other)
    assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize("naming", NAMINGS)
def test_unfuse_gives_the_parameters_back_bit_for_bit(naming):
    stock = model(**NAMINGS[naming])
    before = copy.deepcopy(stock.state_dict())
    fused = fuse(stock)
    assert any(isinstance(m, LinearGroup) for m in fused.modules())
    same_bits(before, fused.state_dict())
    back = unfuse(fused)
    assert not any(isinstance(m, LinearGroup) for m in back.modules())
    same_bits(before, back.state_dict())
    assert {n for n, _ in back.named_parameters()} == set(before)


@pytest.mark.parametrize("naming", NAMINGS)
def test_checkpoints_go_both_ways(naming):
    """Saved of one and loaded into the other, with strict=True."""
    torch.manual_seed(1)
    stock, fused = model(**NAMINGS[naming]), fuse(model(**NAMINGS[naming]))
    for p in stock.parameters():
        torch.nn.init.normal_(p)
    fused.load_state_dict(stock.state_dict())
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    torch.testing.assert_close(fused(x), stock(x))
    other = model(**NAMINGS[naming])
    other.load_state_dict(fused.state_dict())
    same_bits(stock.state_dict(), other.state_dict())


def test_a_checkpoint_that_lacks_a_layer_is_refused():
    state = model().state_dict()
    del state["0.attention.k_proj.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.attention\.k_proj\.weight"):
        fuse(model()).load_state_dict(state)
    state = model().state_dict()
    state["0.attention.k_proj.weight"] = torch.zeros(3, 16)
    with pytest.raises(RuntimeError, match=r"0\.attention\.k_proj\.weight: shape is \(3, 16\)"):
        fuse(model()).load_state_dict(state)


def test_layers_in_another_order():
    """OPT and Whisper have keys first."""
    stock = model(names=("k_proj", "v_proj", "q_proj"), heads=(4, 4, 4))
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    truth, before = stock(x), copy.deepcopy(stock.state_dict())
    fuse(stock)
    torch.testing.assert_close(stock(x), truth)
    same_bits(before, stock.state_dict())


@pytest.mark.parametrize("naming", NAMINGS)
def test_twenty_steps_of_adamw_are_those_of_the_unfused_model(naming):
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    losses = []
    for trained in (model(**NAMINGS[naming]), fuse(model(**NAMINGS[naming]))):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(20):
            loss = (trained(x) - x.roll(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 1e-10


def test_one_product_for_all(monkeypatch):
    stock, x = fuse(model(1)), torch.randn(2, 5, 16, dtype=torch.float64)
    products, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: products.append(tuple(w.shape)) or linear(x, w, b))
    stock(x)
    assert products == [(32, 16), (16, 16), (48, 16), (16, 24)]


def test_cross_attention_and_changed_tensors_are_right():
    stock = Attention()
    fused = fuse(copy.deepcopy(stock))
    x, memory = torch.randn(2, 2, 5, 16).unbind(0)
    for _ in range(2):
        torch.testing.assert_close(fused(x, memory), stock(x, memory))
    torch.testing.assert_close(fused(x), stock(x))
    first = fused.q_proj(x)
    torch.testing.assert_close(first, stock.q_proj(x))
    x.mul_(2.0)  # what is held of it is old
    torch.testing.assert_close(fused.k_proj(x), stock.k_proj(x))
    with torch.no_grad():
        fused.v_proj(x)
    assert fused.q_proj(x).requires_grad


@pytest.mark.parametrize("changed", ["x", "weight", "bias", "autocast"])
def test_outputs_are_not_of_values_that_were_changed_since(changed):
    module = fuse(Attention(bias=True))
    group, x = module.q_proj.shared[0], torch.randn(3, 16)
    with torch.no_grad():
        if changed == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                module.q_proj(x)
            with torch.autocast("cpu", torch.float16):
                assert module.k_proj(x).dtype == torch.float16
            return
        module.q_proj(x)
        (x if changed == "x" else getattr(group, changed)).add_(1.0)
        torch.testing.assert_close(module.k_proj(x), F.linear(x, *group.part(1)))


@pytest.mark.parametrize(
    ("given", "said"),
    [(("x",), "^module: given str; it must be"), ((torch.nn.Linear(2, 2), ["q_proj"]), "^groups: given 'q_proj'")],
)
def test_what_is_no_module_or_no_group_is_refused(given, said):
    with pytest.raises(TypeError, match=said):
        fuse(*given)


def test_compiled_and_copied():
    fused, x = fuse(model(1)), torch.randn(2, 5, 16, dtype=torch.float64)
    truth = fused(x)
    torch.testing.assert_close(torch.compile(fused, fullgraph=True, backend="aot_eager")(x), truth)
    torch.testing.assert_close(copy.deepcopy(fused)(x), truth)
    torch.testing.assert_close(pickle.loads(pickle.dumps(fused))(x), truth)


class Adapter(torch.nn.Linear):
    """As LoRA's layers."""


def adapted(m):
    m[0].attention.k_proj = Adapter(16, 8, False)


def without_bias(m):
    m[0].attention.q_proj.bias = None


def frozen(m):
    m[0].attention.q_proj.requires_grad_(False)


def hooked(m):
    m[0].attention.v_proj.register_forward_hook(lambda *given: None)


def tied(m):
    m[0].attention.k_proj.weight = m[1].attention.k_proj.weight


def half(m):
    m[0].attention.v_proj.half()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (adapted, TypeError, r"0\.attention\.k_proj: it is .*Adapter, .* merge adapters into their layers first"),
        (without_bias, ValueError, r"0\.attention\.k_proj: bias is None is False, and of q_proj True"),
        (frozen, ValueError, r"0\.attention\.k_proj: requires_grad is \[True, True\], and of q_proj \[False, False\]"),
        (hooked, TypeError, r"attention\.[qkv]_proj: Linear has hooks"),
        (tied, ValueError, r"0\.attention\.k_proj: it shares a parameter with another layer of the model"),
        (half, ValueError, r"0\.attention\.v_proj: weight.dtype is torch\.float16"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_what_would_be_lost_is_refused_by_name_and_nothing_changes(change, error, message):
    stock = model(bias=True)
    change(stock)
    before = [type(m) for m in stock.modules()]
    with pytest.raises(error, match=message):
        fuse(stock)
    assert [type(m) for m in stock.modules()] == before


def test_nothing_to_fuse_is_an_error():
    with pytest.raises(ValueError, match="Linear has no layers named q_proj, k_proj, v_proj or"):
        fuse(torch.nn.Linear(2, 2))
    apart = torch.nn.MultiheadAttention(8, 2, kdim=4)  # has no in_proj_weight
    with pytest.raises(
        ValueError, match=r"MultiheadAttention has no layers .*, and none of Wqkv, c_attn, qkv, in_proj"
    ):
        fuse(apart)


def test_what_is_one_product_already_is_left_alone():
    stock = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    ours, x = copy.deepcopy(stock), torch.randn(2, 5, 8)
    assert unfuse(fuse(ours)) is ours
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]
    same_bits(stock.state_dict(), ours.state_dict())
    assert torch.equal(ours(x, x, x)[0], stock(x, x, x)[0])
    both = torch.nn.ModuleList([ours, model(1)])  # what can be fused beside it is
    assert sum(isinstance(m, LinearGroup) for m in fuse(both).modules()) == 2


def test_a_group_alone_has_the_names_of_its_layers():
    group = LinearGroup(8, {"gate": 3, "up": 5})
    assert list(group.state_dict()) == ["gate.weight", "gate.bias", "up.weight", "up.bias"]
    x = torch.randn(2, 8)
    gate, up = group.to_linears().values()
    torch.testing.assert_close(group(x), (gate(x), up(x)))
    with pytest.raises(ValueError, match=r"x: shape is \(2, 7\); its last dimension must be 8"):
        group(x[:, :7])


class Changing(Attention):
    """Changes its input and what its layers return, in place."""

    def forward(self, x, memory=None):
        q = self.q_proj(x)
        q *= 0.5
        if memory is not None:
            x.add_(memory)
        return q, F.silu(self.k_proj(x), inplace=True), self.v_proj(x)


def test_outputs_may_be_changed_in_place():
    stock = Changing().double()
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    found = []
    for module in (stock, fuse(copy.deepcopy(stock))):
        outputs = module(x)
        found.append((*outputs, *torch.autograd.grad(sum(o.square().sum() for o in outputs), x)))
    torch.testing.assert_close(*found)


def test_a_group_under_transforms_and_compiled():
    group, x = LinearGroup(8, {"gate": 3, "up": 5}).double(), torch.randn(2, 4, 8, dtype=torch.float64)
    torch.testing.assert_close(torch.func.vmap(group)(x), group(x))
    loss = torch.func.grad(lambda x: group(x)[1].square().sum())
    torch.testing.assert_close(torch.func.vmap(loss)(x), loss(x))
    _, tangents = torch.func.jvp(group, (x,), (x,))
    torch.testing.assert_close(tangents, tuple(F.linear(x, group.part(i)[0]) for i in range(2)))
    compiled = torch.compile(lambda x: [t.mul_(2) for t in group(x)], fullgraph=True, backend="aot_eager")
    given = x.clone().requires_grad_()
    torch.testing.assert_close(compiled(given), [t * 2 for t in group(x)])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_input_that_changes_between_layers_is_read_again(mode):
    stock = Changing()
    with mode():
        x = torch.randn(2, 3, 16)
        ours = fuse(copy.deepcopy(stock))(x.clone(), torch.ones(16))
        torch.testing.assert_close(ours, stock(x.clone(), torch.ones(16)))


def test_what_knows_the_parameters_already_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"^module: DistributedDataParallel knows its parameters already"):
            fuse(torch.nn.Sequential(torch.nn.parallel.DistributedDataParallel(model())))
        with pytest.raises(TypeError, match=r"_proj: its weight is a DTensor; fuse the model first"):
            fuse(fully_shard(model(), mesh=init_device_mesh("cpu", (1,))))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("groups", [[3], None, ["q_proj"], [["q_proj", 3]]])
def test_groups_that_are_no_names(groups):
    with pytest.raises(TypeError, match=r"^groups: given .*; each group must be a sequence of names"):
        fuse(model(), groups)
    with pytest.raises(ValueError, match=r"^groups: given none"):
        fuse(model(), [])
    with pytest.raises(TypeError, match=r"^module: given str"):
        unfuse("model")


# Models of transformers, of random weights and small.
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}


ASKED = {"max_new_tokens": 32, "do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}


def small(name):
    transformers = pytest.importorskip("transformers")
    made = {
        "Llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 2}),
        "Mistral": ("MistralForCausalLM", "MistralConfig", {"num_key_value_heads": 2}),
        "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"num_key_value_heads": 2}),
        "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"num_key_value_heads": 2, "head_dim": 8}),
        "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", {"num_key_value_heads": 2, "head_dim": 8}),
        "BERT": ("BertModel", "BertConfig", {}),
        "ViT": ("ViTModel", "ViTConfig", {"image_size": 32, "patch_size": 8}),
    }
    model_class, config_class, more = made[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**SMALL, **more})
    return getattr(transformers, model_class)(config).eval()


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma 2", "BERT", "ViT"])
def test_models_of_transformers_give_the_same_and_their_checkpoints_load(name):
    stock = small(name)
    fused = fuse(copy.deepcopy(stock))
    assert sum(isinstance(m, LinearGroup) for m in fused.modules()) >= 2
    given = torch.randn(2, 3, 32, 32) if name == "ViT" else torch.randint(64, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(fused(given)[0], stock(given)[0])
        if hasattr(stock, "generate") and name not in ("BERT", "ViT"):
            assert torch.equal(fused.generate(given, **ASKED), stock.generate(given, **ASKED))
    fresh = small(name)
    fresh.load_state_dict(fused.state_dict(), strict=True)
    same_bits(stock.state_dict(), fresh.state_dict())
    same_bits(stock.state_dict(), unfuse(fused).state_dict())


def test_gpt2_is_one_product_already():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=64)
    stock = transformers.GPT2LMHeadModel(config).eval()
    ours, given = fuse(copy.deepcopy(stock)), torch.randint(64, (2, 9))
    with torch.no_grad():
        assert torch.equal(ours(given).logits, stock(given).logits)
        assert torch.equal(ours.generate(given, **ASKED), stock.generate(given, **ASKED))
    same_bits(stock.state_dict(), ours.state_dict())
    same_bits(stock.state_dict(), unfuse(ours).state_dict())
