"""Patterns are found in any spelling, and look-alikes and mutants are left alone."""

import numpy as np
import pytest
import spellings
import torch

from kernel_pytorch.compile_recipes.finders import find
from kernel_pytorch.compile_recipes.recorder import record

SPELLED = [(kind, name) for kind, cases in spellings.VARIANTS.items() for name in cases]


def found_in(make, seed=0):
    torch.manual_seed(seed)
    module, inputs = make()
    return find(record(module, inputs))


@pytest.mark.parametrize(("kind", "name"), SPELLED, ids=[f"{kind}-{name}" for kind, name in SPELLED])
def test_a_pattern_is_found_in_any_spelling(kind, name):
    kinds = (kind, "activation") if kind == "bias_act" else (kind,)  # by hand, it has a name of its own
    hits = [f for f in found_in(spellings.VARIANTS[kind][name]) if f.kind in kinds]
    assert hits
    assert hits[0].line.startswith(spellings.__file__)


@pytest.mark.parametrize("name", spellings.LOOKALIKES)
def test_what_looks_alike_is_left_alone(name):
    assert [f.kind for f in found_in(spellings.LOOKALIKES[name]) if f.kind != "bias_act"] == []


@pytest.mark.parametrize("name", spellings.MUTANTS)
def test_a_mutant_is_not_taken_for_the_pattern(name):
    kinds = [f.kind for f in found_in(spellings.MUTANTS[name]) if "not proven" not in f.what]
    assert not {"rms_norm", "layer_norm", "attention", "rotary", "gated_mlp"} & {*kinds}


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("att_plain", "is_causal=False, scale=0.25"),
        ("att_masked_fill", "is_causal=True, scale=0.25"),
        ("att_additive", "is_causal=True, scale=1"),
        ("att_transposed", "is_causal=False, scale=0.25"),
        ("att_bias", "attn_mask=mask, is_causal=False, scale=0.25"),
    ],
)
def test_attention_is_proven_equal_to_one_call(name, call):
    (hit,) = [f for f in found_in(spellings.VARIANTS["attention"][name]) if f.kind == "attention"]
    assert hit.what == f"equal to scaled_dot_product_attention(q, k, v, {call})"


def test_a_mask_that_depends_on_inputs_is_said_to_be_kept():
    def attend(s, x, mask):
        return (x @ x.mT * 0.25).masked_fill(mask, float("-inf")).softmax(-1) @ x

    inputs = torch.randn(2, 6, 16), torch.zeros(2, 1, 6, dtype=torch.bool)
    (hit,) = [f for f in found_in(lambda: (spellings.Fn(attend), inputs)) if f.kind == "attention"]
    call = "scaled_dot_product_attention(q, k, v, is_causal=False, scale=0.25)"
    assert hit.what == f"equal to {call} here; a mask depends on inputs, and is kept as it is"


def test_attention_of_pytorchs_own_module_is_not_by_hand():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    kinds = {f.kind for f in find(record(layer, (torch.randn(2, 12, 32),)))}
    assert "attention_math" in kinds
    assert "attention" not in kinds


def test_a_norm_names_its_weight_its_offset_and_its_eps():
    (plain,) = [f for f in found_in(spellings.VARIANTS["rms_norm"]["rms_helper"]) if f.kind == "rms_norm"]
    assert plain.what == "by hand, weight w, eps 1e-06"
    (gemma,) = [f for f in found_in(spellings.VARIANTS["rms_norm"]["rms_offset"]) if f.kind == "rms_norm"]
    assert "weight w, offset 1" in gemma.what


@pytest.mark.parametrize(
    ("norm", "eps"),
    [
        (lambda x: x * torch.rsqrt(x.square().mean(-1, True) + 1.5e-6), ", eps 1.5e-06"),
        (lambda x: x / (x.square().mean(-1, True) + 1e-12) ** 0.5, ", eps 1e-12"),
        (lambda x: x / (x.square().mean(-1, True).sqrt() + 1e-8), ""),
        (lambda x: x / (x.square().mean(-1, True) ** 0.5 + 1e-8), ""),
        (lambda x: torch.nn.functional.normalize(x, dim=-1) * 32**0.5, ""),
    ],
)
def test_an_eps_is_named_as_it_stands_inside_the_root(norm, eps):
    (hit,) = found_in(lambda: (spellings.Fn(lambda s, x: norm(x)), (torch.randn(2, 6, 32),)))
    assert hit.what == f"by hand{eps}"


def test_what_a_fusion_saves_is_counted():
    (hit,) = [f for f in found_in(spellings.VARIANTS["rms_norm"]["rms_helper"]) if f.kind == "rms_norm"]
    x = spellings.B * spellings.T * spellings.D * 4
    assert 4 * x <= hit.moved <= 6 * x  # square, product, product: each writes what the next one reads


class ByHand(torch.nn.Module):
    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)  # what F.rms_norm( computes
        return torch.softmax(y @ y.mT * 0.25, -1) @ y  # scaled_dot_product


class ByHelpers(torch.nn.Module):
    def product(self, a, b):
        return torch.einsum("...ij,...jk->...ik", a, b)

    def forward(self, x):
        return self.product(torch.softmax(self.product(x, x.mT) * 0.25, -1), x)


class ByPyTorch(torch.nn.Module):
    def forward(self, x):
        short = torch.rms_norm
        y = short(x, (x.shape[-1],), None, 1e-6)
        whole = torch.nn.functional.scaled_dot_product_attention
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return whole(y, y, y)


def test_words_on_a_line_do_not_say_who_computes_it():
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    kinds = {f.kind for f in find(record(ByHand(), (x,)))}
    assert {"rms_norm", "attention"} <= kinds
    assert {"rms_norm", "attention"} <= {f.kind for f in find(record(torch.fx.symbolic_trace(ByHand()), (x,)))}
    assert "attention" in {f.kind for f in find(record(ByHelpers(), (x,)))}
    kinds = {f.kind for f in find(record(ByPyTorch(), (x,)))}
    assert not {"rms_norm", "attention"} & kinds


class Created(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.arange(4))

    def by_list(self, x):
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0])

    def by_range(self, x):
        places = torch.arange(x.shape[-1])
        return x + places[None].float() / 2

    def by_numpy(self, x):
        return x + torch.from_numpy(np.ones(4))

    def on_the_device(self, x):
        places = torch.arange(x.shape[-1], device=x.device)
        return x + places + torch.zeros(4, device=x.device) + torch.zeros_like(x) + x.new_ones(4)

    def by_buffer(self, x):
        return x + self.kept

    def by_number(self, x):
        return x * torch.tensor(2.0)

    def for_python(self, x):
        return x + sum(torch.arange(4).tolist())

    def forward(self, x):
        return getattr(self, self.way)(x)


@pytest.mark.parametrize(
    ("way", "count"),
    [("by_list", 1), ("by_range", 1), ("by_numpy", 1), ("on_the_device", 0), ("by_buffer", 0), ("by_number", 0),
     ("for_python", 0)],
)  # fmt: skip
def test_tensors_of_the_host_are_found(way, count):
    model = Created()
    model.way = way
    found = [f for f in find(record(model, (torch.randn(2, 4),))) if f.kind == "created"]
    assert len(found) == count
    for f in found:
        first = getattr(Created, way).__code__.co_firstlineno
        assert f.line == f"{__file__}:{first + 1}"
