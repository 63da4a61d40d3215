"""`QKVProjection`, `FusedSelfAttention`, `RotaryTable` and the embeddings, against the modules that they stand for."""

import copy
import math
import re

import pytest
import torch
from torch.nn import functional as F

from kernel_pytorch.qkv_fusion import (
    FusedSelfAttention,
    KVCache,
    PatchEmbedding,
    QKVProjection,
    RotaryTable,
    TokenPositionEmbedding,
)
from kernel_pytorch.qkv_fusion.modules.table import NEEDED


class Conv1D(torch.nn.Module):
    """As GPT-2's, whose weight is `(in, out)`."""

    def __init__(self, rows, columns):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.randn(columns, rows)), torch.nn.Parameter(torch.randn(rows))

    def forward(self, x):
        return x @ self.weight + self.bias


def attention(naming):
    """A module that projects under names of that naming, and what it makes of x."""
    torch.manual_seed(0)
    module = torch.nn.Module()
    if naming == "in_proj":
        module = torch.nn.MultiheadAttention(16, 4)
        torch.nn.init.normal_(module.in_proj_bias)
        return module, lambda x: F.linear(x, module.in_proj_weight, module.in_proj_bias)
    if naming == "c_attn":
        module.c_attn = Conv1D(48, 16)
        return module, module.c_attn
    if naming in ("Wqkv", "qkv"):
        module.add_module(naming, torch.nn.Linear(16, 48))
        return module, module.get_submodule(naming)
    names = {"q_proj": ("q_proj", "k_proj", "v_proj"), "query": ("query", "key", "value")}[naming]
    for name in names:
        module.add_module(name, torch.nn.Linear(16, 16, naming == "query"))
    return module, lambda x: torch.cat([module.get_submodule(name)(x) for name in names], -1)


@pytest.mark.parametrize("naming", ["q_proj", "query", "Wqkv", "qkv", "c_attn", "in_proj"])
def test_every_naming_goes_in_and_comes_back_bit_for_bit(naming):
    module, project = attention(naming)
    before, x = copy.deepcopy(dict(module.named_parameters())), torch.randn(2, 5, 16)
    fused = QKVProjection.from_attention(module, 4)
    assert fused.naming == naming
    found = torch.cat([t.flatten(-2) for t in fused(x)], -1)
    torch.testing.assert_close(found, project(x))
    assert set(fused.state_dict()) <= set(before)
    assert all(torch.equal(value, before[name]) for name, value in fused.state_dict().items())
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    fused.to_attention(module)
    assert all(torch.equal(dict(module.named_parameters())[name], before[name]) for name in fused.state_dict())


def test_what_it_does_not_know_is_refused_by_name():
    module = torch.nn.Module()
    module.query_key_value = torch.nn.Linear(16, 48)
    with pytest.raises(ValueError, match="has query_key_value: its rows go head by head"):
        QKVProjection.from_attention(module, 4)
    with pytest.raises(ValueError, match="Linear has none of q_proj, query, Wqkv, qkv, c_attn, in_proj; it has weight"):
        QKVProjection.from_attention(torch.nn.Linear(2, 2), 1)
    with pytest.raises(ValueError, match="head_dim: given None; 10 channels are not 4 heads"):
        QKVProjection(10, 4)


OPTIONS = {
    "rotary and QK-norm": {"qk_norm": 1e-6, "rotary": RotaryTable(8), "num_kv_heads": 2},
    "rotary": {"rotary": RotaryTable(4, theta=500.0), "interleaved": True},
    "neither": {"bias": True, "out_bias": True, "naming": "query"},
}


def attend(module, x, causal):
    """The same of stock PyTorch, in the state_dict's own names."""
    state, heads = module.state_dict(), module.projection
    names = ("query", "key", "value") if heads.naming == "query" else ("q_proj", "k_proj", "v_proj")
    parts = [F.linear(x, state[f"{n}.weight"], state.get(f"{n}.bias")).unflatten(-1, (-1, 8)) for n in names]
    if module.q_norm is not None:
        for i, norm in enumerate((module.q_norm, module.k_norm)):
            parts[i] = F.rms_norm(parts[i], (8,), norm.weight, norm.eps)
    if module.rotary is not None:
        cos, sin = (t[:, None] for t in module.rotary(torch.arange(x.shape[1])))
        size = 2 * cos.shape[-1]
        for i, part in enumerate(parts[:2]):
            first, second = part[..., :size].chunk(2, -1)
            if module.interleaved:
                first, second = part[..., 0:size:2], part[..., 1:size:2]
            turned = (first * cos - second * sin, second * cos + first * sin)
            joined = torch.stack(turned, -1).flatten(-2) if module.interleaved else torch.cat(turned, -1)
            parts[i] = torch.cat((joined, part[..., size:]), -1)
    q, k, v = (t.transpose(1, 2) for t in parts)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2).flatten(-2)
    out = module.get_submodule(module.output)
    return F.linear(y, out.weight, out.bias)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("level", [None, "reference", "triton"])
def test_attention_is_that_of_stock_pytorch(option, level):
    torch.manual_seed(0)
    module = FusedSelfAttention(32, 4, level=level, **OPTIONS[option])
    if module.q_norm is not None:
        torch.nn.init.normal_(module.q_norm.weight)
    x = torch.randn(2, 7, 32)
    torch.testing.assert_close(module(x, is_causal=True), attend(module, x, True))
    torch.testing.assert_close(module(x), attend(module, x, False))
    module(x).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("option", OPTIONS)
def test_token_by_token_with_the_cache_is_all_at_once(option):
    module = FusedSelfAttention(32, 4, **OPTIONS[option])
    x, cache = torch.randn(2, 9, 32), KVCache(2, 9, module.projection)
    with torch.no_grad():
        whole = module(x, is_causal=True)
        steps = [module(part, is_causal=True, cache=cache) for part in x.split((3, 1, 4, 1), 1)]
        torch.testing.assert_close(torch.cat(steps, 1), whole)
        with pytest.raises(ValueError, match="length: the cache holds 9 tokens; 10 are needed"):
            module(x[:, :1], is_causal=True, cache=cache)


def test_attention_refuses_a_cache_of_another_batch_and_two_masks():
    module = FusedSelfAttention(32, 4)
    x = torch.randn(1, 3, 32)
    with pytest.raises(ValueError, match=r"^cache: it holds \(B, K, D\) = \(2, 4, 8\); given are \(1, 3, 4, 8\)"):
        module(x, cache=KVCache(2, 9, module.projection))
    with pytest.raises(ValueError, match=r"^attn_mask: given with is_causal"):
        module(x, attn_mask=torch.ones(3, 3, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match=r"^level: given 'zz'"):
        FusedSelfAttention(32, 4, level="zz")
    with pytest.raises(TypeError, match=r"^qk_norm: given bool"):
        FusedSelfAttention(32, 4, qk_norm=True, rotary=RotaryTable(8))
    with pytest.raises(TypeError, match=r"^rotary: given int; it must be a RotaryTable or None"):
        FusedSelfAttention(32, 4, rotary=16)
    with pytest.raises(ValueError, match=r"^head_dim: given 0"):
        FusedSelfAttention(32, 4, head_dim=0)


def test_a_call_that_fails_leaves_the_cache_as_it_was():
    module = FusedSelfAttention(32, 4)
    x, cache = torch.randn(1, 3, 32), KVCache(1, 9, module.projection)
    with torch.no_grad():
        module(x, cache=cache)
        with pytest.raises(RuntimeError):
            module(x, attn_mask=torch.ones(5, 5, dtype=torch.bool), cache=cache)
        assert cache.filled == 3


def test_state_of_attention_has_the_names_of_models():
    names = list(FusedSelfAttention(32, 4, **OPTIONS["rotary and QK-norm"]).state_dict())
    assert sorted(names) == [
        "k_norm.weight",
        "k_proj.weight",
        "o_proj.weight",
        "q_norm.weight",
        "q_proj.weight",
        "v_proj.weight",
    ]


@pytest.mark.parametrize("option", OPTIONS)
def test_state_of_attention_loads_again(option):
    module, other = FusedSelfAttention(32, 4, **OPTIONS[option]), FusedSelfAttention(32, 4, **OPTIONS[option])
    other.load_state_dict(module.state_dict())
    x = torch.randn(2, 3, 32)
    assert torch.equal(other(x), module(x))
    state = module.state_dict()
    name = next(n for n in state if n.startswith(("k_proj", "key")))
    with pytest.raises(RuntimeError, match=rf"Missing key.*{name}"):
        other.load_state_dict({n: t for n, t in state.items() if n != name})


SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "type, the older name": {"type": "linear", "factor": 4.0},
    "yarn between pairs": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "truncate": False, "beta_fast": 20,
    },
    "yarn with two scales": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
    "yarn with its own factor": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 0.9,
        "mscale": 0.7, "mscale_all_dim": 1.3,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
def test_tables_are_those_of_transformers(kind):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    configuration = pytest.importorskip("transformers.models.llama.configuration_llama")
    scaling = SCALINGS[kind]
    config = configuration.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=128,
        rope_parameters={**scaling, "rope_theta": 10000.0},
    )  # fmt: skip
    positions = torch.arange(300)[None]
    theirs = modeling.LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    given = {"original_max_position_embeddings": 128, "rope_theta": 10000.0, **scaling}
    ours = RotaryTable(64, scaling=given)(positions)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other[..., :32], rtol=1e-4, atol=1e-4)


def test_tables_stay_float32_in_a_model_of_16_bits():
    table = RotaryTable(64)
    truth = table(torch.tensor([100003]))
    torch.testing.assert_close(table.to(torch.bfloat16)(torch.tensor([100003])), truth, rtol=0, atol=0)


def test_positions_of_several_dimensions_each_turn_their_sections():
    table, plain = RotaryTable(16, sections=(2, 3, 3)), RotaryTable(16)
    positions = torch.stack([torch.arange(5), torch.arange(5) * 2, torch.arange(5) + 7])
    cos, _ = table(positions)
    for i, columns in enumerate(torch.arange(8).split((2, 3, 3))):
        torch.testing.assert_close(cos[:, columns], plain(positions[i])[0][:, columns])
    with pytest.raises(ValueError, match=r"position_ids: shape is \(2, 5\); it must be \(3, ..., S\)"):
        table(positions[:2])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dimension": 7}, "dimension: given 7; it must be even"),
        ({"dimension": 8, "scaling": {"rope_type": "longrope"}}, "given 'longrope'; allowed are 'default', 'linear'"),
        ({"dimension": 8, "scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' needs low_freq_factor, high_f"),
        ({"dimension": 8, "sections": (1, 2)}, "they must add up to 4"),
        ({"dimension": 8, "theta": -1.0}, r"^theta: given -1\.0; it must be above 0"),
        ({"dimension": 8, "theta": 0.0}, r"^theta: given 0\.0; it must be above 0"),
        ({"dimension": 8, "theta": math.nan}, "^theta: given nan; it must be finite"),
        *(
            ({"dimension": 8, "scaling": {**SCALINGS["llama3"], **SCALINGS["yarn"], "rope_type": kind, name: wrong}},
             rf"^scaling\['{name}'\]: given {wrong}; it must be ")
            for kind, names in NEEDED.items() for name in names for wrong in (0.0, -2.0, math.inf)
        ),
        (
            {"dimension": 8, "scaling": {**SCALINGS["llama3"], "high_freq_factor": 1.0}},
            r"^scaling\['high_freq_factor'\]: given 1\.0; it must be above low_freq_factor, 1\.0",
        ),
        ({"dimension": 8, "scaling": {"factor": 4.0}}, "^scaling: 'default' has no factor; allowed are rope_type"),
        ({"dimension": 8, "scaling": {**SCALINGS["yarn"], "betafast": 2}}, "^scaling: 'yarn' has no betafast; allowed"),
        ({"dimension": 8, "scaling": {"rope_theta": 5e5}}, r"^scaling\['rope_theta'\]: given 500000\.0; theta is"),
        ({"dimension": 8, "theta": 1, "scaling": SCALINGS["yarn"]}, r"^theta: given 1\.0; it must be above 1"),
        (
            {"dimension": 2, "scaling": {**SCALINGS["dynamic"], "original_max_position_embeddings": 128}},
            "^dimension: given 2; it must be above 2",
        ),
        ({"dimension": 8, "sections": (-1, 5)}, "^sections: given"),
    ],
)  # fmt: skip
def test_bad_tables(given, message):
    with pytest.raises(ValueError, match=message):
        RotaryTable(**given)


def test_what_is_no_number_or_tensor_is_refused_by_name():
    with pytest.raises(TypeError, match=r"^theta: given str; it must be a Python number"):
        RotaryTable(8, theta="10000")
    with pytest.raises(TypeError, match=r"^scaling\['factor'\]: given NoneType; it must be a Python number"):
        RotaryTable(8, scaling={"rope_type": "linear", "factor": None})
    with pytest.raises(TypeError, match=r"^scaling: given str; it must be a mapping or None"):
        RotaryTable(8, scaling="yarn")
    with pytest.raises(TypeError, match=r"^sections: given 3; it must be a sequence of integers or None"):
        RotaryTable(8, sections=3)
    with pytest.raises(ValueError, match=r"^sections: given \[\]; they must add up to 4"):
        RotaryTable(8, sections=[])
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    with pytest.raises(ValueError, match=r"^scaling\['beta_fast'\]: given -1; it must be above 0"):
        RotaryTable(8, scaling={**yarn, "beta_fast": -1})
    with pytest.raises(TypeError, match=r"^scaling\['attention_factor'\]: given str; it must be a Python number"):
        RotaryTable(8, scaling={**yarn, "attention_factor": "x"})
    with pytest.raises(ValueError, match=r"^scaling\['partial_rotary_factor'\]: leave it out; dimension counts"):
        RotaryTable(8, scaling={"rope_type": "default", "partial_rotary_factor": 0.5})
    with pytest.raises(TypeError, match=r"^position_ids: given list; it must be a torch\.Tensor"):
        RotaryTable(16)([1, 2])
    assert RotaryTable(8, theta=1)(torch.arange(3))[0].isfinite().all()
    with pytest.raises(ValueError, match=r"^position_ids: shape is \(\); it must be \(2, ..., S\)"):
        RotaryTable(8, sections=(2, 2))(torch.tensor(3))


def test_attention_names_what_does_not_fit():
    for heads in (3, 16):
        with pytest.raises(ValueError, match=f"^num_kv_heads: given {heads}; it must divide num_heads, 8"):
            FusedSelfAttention(512, 8, heads)
    attention = FusedSelfAttention(16, 4, 2)
    for shape in ((2, 5, 12), (5, 16), (1, 2, 5, 16)):
        with pytest.raises(ValueError, match=rf"^x: shape is {re.escape(str(shape))}; it must be \(B, S, 16\)"):
            attention(torch.randn(shape))
    with pytest.raises(TypeError, match=r"^x: given list; it must be a torch\.Tensor"):
        attention([1.0])
    with pytest.raises(ValueError, match=r"^x: shape is \(5, 12\); it must be \(\.\.\., S, 16\)"):
        QKVProjection(16, 4)(torch.randn(5, 12))


def test_embeddings_are_what_bert_adds():
    words, places, kinds = torch.nn.Embedding(11, 8), torch.nn.Embedding(9, 8), torch.nn.Embedding(2, 8)
    norm = torch.nn.LayerNorm(8)
    ids, segments = torch.randint(11, (2, 5)), torch.randint(2, (2, 5))
    module = TokenPositionEmbedding(words, places, kinds, norm)
    truth = norm(words(ids) + places(torch.arange(5)) + kinds(segments))
    torch.testing.assert_close(module(ids, segment_ids=segments), truth)
    torch.testing.assert_close(module(ids), norm(words(ids) + places(torch.arange(5)) + kinds.weight[0]))
    assert module.tokens.weight is words.weight
    with pytest.raises(ValueError, match="segment_ids: given a tensor; it must be None"):
        TokenPositionEmbedding(words)(ids, segment_ids=segments)
    with pytest.raises(ValueError, match="positions: embedding_dim is 4; it must be that of tokens, 8"):
        TokenPositionEmbedding(words, torch.nn.Embedding(9, 4))


def test_sinusoids_go_by_distance():
    """The product of two positions' sinusoids depends on their distance alone."""
    words = torch.nn.Embedding(3, 8)
    torch.nn.init.zeros_(words.weight)
    table = TokenPositionEmbedding(words)(torch.zeros(9, dtype=torch.long))
    torch.testing.assert_close((table[1:] * table[:-1]).sum(-1), (table[1] @ table[0]).expand(8))


def test_patches_are_those_of_the_convolution():
    convolution = torch.nn.Conv2d(3, 8, (4, 2), (4, 2))
    images = torch.randn(2, 3, 8, 6)
    module = PatchEmbedding(convolution)
    torch.testing.assert_close(module(images), convolution(images).flatten(2).transpose(1, 2))
    assert list(module.state_dict()) == list(convolution.state_dict())
    with pytest.raises(ValueError, match=r"images: shape is \(2, 3, 8, 5\)"):
        module(images[..., :5])
    with pytest.raises(ValueError, match="convolution: it has"):
        PatchEmbedding(torch.nn.Conv2d(3, 8, 4, 2))
