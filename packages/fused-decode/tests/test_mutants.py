"""Planted faults: `kernel-pytorch verify` must turn red on each, naming level, case and quantity."""

import pytest
import torch

from kernel_pytorch.fused_decode.levels import reference
from kernel_pytorch.fused_decode.technique import technique
from kernel_pytorch.harness.mutants import failures_of

attend = reference.rotary_cache_attention


# Products.


def offset_ignored(x, weight, norm_weight, bias, norm, norm_bias, norm_offset, eps):
    return reference.norm_linear(x, weight, norm_weight, bias, norm, norm_bias, 0.0, eps)


def eps_too_large(x, weight, norm_weight, bias, norm, norm_bias, norm_offset, eps):
    return reference.norm_linear(x, weight, norm_weight, bias, norm, norm_bias, norm_offset, 10 * eps)


def norm_bias_ignored(x, weight, norm_weight, bias, norm, norm_bias, norm_offset, eps):
    return reference.norm_linear(x, weight, norm_weight, bias, norm, None, norm_offset, eps)


def mean_kept(x, weight, norm_weight, bias, norm, norm_bias, norm_offset, eps):
    return reference.norm_linear(x, weight, norm_weight, bias, "rms", norm_bias, norm_offset, eps)


def bias_of_rows_ignored(x, weight, norm_weight, bias, *norm):
    return reference.norm_linear(x, weight, norm_weight, bias if x[..., 0].numel() == 1 else None, *norm)


def first_row_for_all(x, *rest):
    rows = x.reshape(-1, x.shape[-1])
    return reference.norm_linear(rows[:1].expand(rows.shape).reshape(x.shape), *rest)


def last_column_of_k_skipped(x, weight, *rest):
    weight = torch.cat((weight[:, :-1], torch.zeros_like(weight[:, -1:])), 1)
    return reference.norm_linear(x, weight, *rest)


def squares_in_16_bits(x, weight, norm_weight, bias, norm, norm_bias, norm_offset, eps):
    if norm == "layer":
        return reference.norm_linear(x, weight, norm_weight, bias, norm, norm_bias, norm_offset, eps)
    rms = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return reference.product((x * rms) * (norm_weight + norm_offset).to(x.dtype), weight, bias).to(x.dtype)


def halves_swapped(x, weight, norm_weight, bias, *rest):
    halves = [None if t is None else torch.cat(t.chunk(2)[::-1]) for t in (weight, bias)]
    return reference.norm_gated_linear(x, halves[0], norm_weight, halves[1], *rest)


def tanh_for_erf(x, weight, norm_weight, bias, activation, *rest):
    activation = "gelu_tanh" if activation == "gelu" else activation
    return reference.norm_gated_linear(x, weight, norm_weight, bias, activation, *rest)


def bias_of_the_gate_for_both(x, weight, norm_weight, bias, *rest):
    bias = None if bias is None else torch.cat([bias.chunk(2)[0]] * 2)
    return reference.norm_gated_linear(x, weight, norm_weight, bias, *rest)


def residual_added_twice(x, weight, residual, bias):
    return reference.linear_residual(x, weight, 2 * residual, bias)


def residual_written(x, weight, residual, bias):
    return residual.copy_(reference.linear_residual(x, weight, residual, bias)).clone()


# Attention. Each gets the arguments by name, and changes some of them.

NAMES = (
    "qkv", "k_cache", "v_cache", "lengths", "cos", "sin", "num_heads", "scale", "window", "softcap", "q_norm", "k_norm",
    "norm_offset", "eps", "sinks", "block_table",
)  # fmt: skip


def changed(name, change):
    """Attention with some arguments changed."""

    def mutant(*given):
        named = dict(zip(NAMES, given, strict=True))
        return attend(**{**named, **change(named)})

    mutant.__name__ = name
    return mutant


def reads_cache_of_before(*given):
    """As if the new key were written behind the attention."""
    named = dict(zip(NAMES, given, strict=True))
    before = named["k_cache"].clone(), named["v_cache"].clone()
    attend(**named)
    return attend(**{**named, "k_cache": before[0].roll(1, 2), "v_cache": before[1]})


def writes_nothing(*given):
    named = dict(zip(NAMES, given, strict=True))
    return attend(**{**named, "k_cache": named["k_cache"].clone(), "v_cache": named["v_cache"].clone()})


def writes_of_inactive_rows(*given):
    named = dict(zip(NAMES, given, strict=True))
    o = attend(**named)
    named["v_cache"][:, :, 0] = named["v_cache"][:, :, 0].masked_fill((named["lengths"] < 0).any(), 3.0)
    return o


def inactive_rows_of_the_first(*given):
    named = dict(zip(NAMES, given, strict=True))
    o = attend(**named)
    return torch.where((named["lengths"] < 0)[:, None], o[1 % len(o)], o)


def interleaved(named):
    """Pairs side by side, for pairs in halves."""
    depth = named["k_cache"].shape[-1]
    order = torch.arange(2 * named["cos"].shape[1]).view(2, -1).T.flatten()
    order = torch.cat((order, torch.arange(len(order), depth)))
    return {"qkv": named["qkv"].unflatten(-1, (-1, depth))[..., order].flatten(1)}


def by_modulo(named):
    """Query head h reads head h % HK."""
    heads, kv_heads, depth = named["num_heads"], *named["k_cache"].shape[1::2]
    split = named["qkv"].unflatten(-1, (-1, depth)).split((heads, 2 * kv_heads), 1)
    order = torch.arange(heads).view(kv_heads, -1).T.flatten()
    return {"qkv": torch.cat((split[0][:, order], split[1]), 1).flatten(1)}


def shifted(named):
    return {name: torch.cat((named[name][1:], named[name][:1])) for name in ("cos", "sin")}


ATTENTION = {
    "case typical": [
        changed("position off by one", shifted),
        changed("pairs side by side", interleaved),
        changed("heads by modulo", by_modulo),
        changed("rotated the other way", lambda n: {"sin": -n["sin"]}),
        changed("scale of another head size", lambda n: {"scale": 1.1 * n["k_cache"].shape[-1] ** -0.5}),
        reads_cache_of_before,
        writes_nothing,
    ],
    "case inactive": [writes_of_inactive_rows, inactive_rows_of_the_first],
    "case window": [changed("window off by one", lambda n: {"window": n["window"] and n["window"] - 1})],
    "case ring": [changed("no window", lambda n: {"window": None})],
    "case ring with room": [changed("a wide window", lambda n: {"window": n["window"] and n["k_cache"].shape[2]})],
    "case pages": [
        changed(
            "pages in their order in memory",
            lambda n: {"block_table": None if n["block_table"] is None else n["block_table"].sort(-1).values},
        )
    ],
    "case soft cap": [changed("no soft cap", lambda n: {"softcap": None})],
    "case sinks": [changed("no sinks", lambda n: {"sinks": None})],
    "case norms": [changed("no norm of keys", lambda n: {"k_norm": None})],
    "case norms with an offset": [changed("no offset", lambda n: {"norm_offset": 0.0})],
    "case partial rotation": [
        changed("all columns turn", lambda n: {
            name: n[name].repeat(1, 4)[:, : n["k_cache"].shape[-1] // 2] for name in ("cos", "sin")
        })
    ],
}  # fmt: skip

PRODUCTS = {
    "norm_linear": {
        offset_ignored: "case gemma ", eps_too_large: "magnitude 1e-6", norm_bias_ignored: "case layer norm ",
        mean_kept: "case layer norm, no bias", bias_of_rows_ignored: "case bias ", first_row_for_all: "case typical",
        last_column_of_k_skipped: "case odd", squares_in_16_bits: "case large",
    },
    "norm_gated_linear": {
        halves_swapped: "case typical", tanh_for_erf: "case GeGLU", bias_of_the_gate_for_both: "case bias",
    },
    "linear_residual": {residual_added_twice: "case typical", residual_written: "residual was written into"},
}  # fmt: skip
OF_PRODUCTS = [
    pytest.param(operation, mutant, sign, id=mutant.__name__)
    for operation, mutants in PRODUCTS.items()
    for mutant, sign in mutants.items()
]
OF_ATTENTION = [
    pytest.param(mutant, sign, id=mutant.__name__) for sign, mutants in ATTENTION.items() for mutant in mutants
]


@pytest.mark.parametrize("operation", [*PRODUCTS, "rotary_cache_attention"])
def test_an_unchanged_copy_is_right(operation):
    assert failures_of(technique, operation, getattr(reference, operation)) == []


@pytest.mark.parametrize(("operation", "mutant", "sign"), OF_PRODUCTS)
def test_a_wrong_product_is_found(operation, mutant, sign):
    found = failures_of(technique, operation, mutant, budget_factor=4.0)
    assert any(f"{operation} level 'native', " in line and sign in line for line in found), found


@pytest.mark.parametrize(("mutant", "sign"), OF_ATTENTION)
def test_wrong_attention_is_found(mutant, sign):
    name = sign.removeprefix("case ")
    found = failures_of(
        technique, "rotary_cache_attention", mutant, budget_factor=4.0, adversarial=False,
        points=lambda point: point if point.core or point.name == name else None,
    )  # fmt: skip
    assert any(f"rotary_cache_attention level 'native', {sign} " in line and "output" in line for line in found), found
