"""Attention to a cache: drawn combinations against a loop in float64, and exactly which slots are written.

The oracle is the formula for one head at a time, with the slot and the page of every key looked up.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_pytorch.fused_decode import rotary_cache_attention
from kernel_pytorch.fused_decode.levels import LADDER

COMPILE = pytest.param("compile", marks=pytest.mark.slow)
LEVELS = ["reference", "native", "torchscript", COMPILE, "triton"]
EMPTY = 7777.0
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


def available(level, dtype=torch.float32):
    reason = LADDER.unavailable(level, torch.device("cpu"), dtype)
    if reason is not None:
        pytest.skip(reason)


def place(table, b, slot, size):
    """Page and place in it of a slot of row b."""
    return (b, slot) if table is None else (int(table[b, slot // size]), slot % size)


def turned(x, position, cos, sin, weight, offset, eps):
    """A head in float64: normalised, rotated pair by pair."""
    if weight is not None:
        x = x / (x.square().mean() + eps).sqrt() * (weight.double() + offset)
    y, half = x.clone(), cos.shape[1]
    for i in range(half):
        c, s = cos[position, i].double(), sin[position, i].double()
        y[i], y[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
    return y


def oracle(
    qkv, k_cache, v_cache, lengths, cos, sin, *, num_heads, scale=None, window=None, softcap=None, q_norm=None,
    k_norm=None, norm_offset=0.0, eps=1e-6, sinks=None, block_table=None,
):  # fmt: skip
    """The result, and what the caches hold afterwards, in float64."""
    keys, values = k_cache.double().clone(), v_cache.double().clone()
    (_, kv_heads, size, depth), group = keys.shape, num_heads // keys.shape[1]
    room = size if block_table is None else size * block_table.shape[1]
    heads = qkv.double().view(qkv.shape[0], -1, depth)
    out = torch.zeros(qkv.shape[0], num_heads, depth, dtype=torch.float64)
    for b, position in enumerate(lengths.tolist()):
        if position < 0 or position >= cos.shape[0] or (window is None and position >= room):
            continue
        angles = position, cos, sin
        page, slot = place(block_table, b, position % room, size)
        for h in range(kv_heads):
            keys[page, h, slot] = turned(heads[b, num_heads + h], *angles, k_norm, norm_offset, eps)
            values[page, h, slot] = heads[b, num_heads + kv_heads + h]
        seen = range(0 if window is None else max(0, position - window + 1), position + 1)
        places = [place(block_table, b, j % room, size) for j in seen]
        for h in range(num_heads):
            q = turned(heads[b, h], *angles, q_norm, norm_offset, eps)
            s = torch.stack([keys[p, h // group, j] @ q for p, j in places]) * (depth**-0.5 if scale is None else scale)
            s = s if softcap is None else softcap * torch.tanh(s / softcap)
            v = torch.stack([values[p, h // group, j] for p, j in places])
            if sinks is not None:
                s, v = torch.cat((s, sinks[h : h + 1].double())), torch.cat((v, v.new_zeros(1, depth)))
            out[b, h] = torch.softmax(s, 0) @ v
    return out.flatten(1), keys, values


def make(sizes, options, dtype=torch.float32):
    """Arguments of a call; slots without a key hold a number that would show."""
    rows, kv_heads, group, room, depth, page = (
        sizes[n] for n in ("rows", "kv_heads", "group", "room", "depth", "page")
    )
    torch.manual_seed(sizes["seed"])
    heads, table, shape = kv_heads * group, None, (rows, kv_heads, room, depth)
    if page:
        count = -(-room // page)
        shape = rows * count + 2, kv_heads, page, depth
        table = torch.randperm(shape[0])[: rows * count].view(rows, count).to(torch.int32)
        room = count * page
    lengths = [min(n, 3 * room - 1) if options.get("window") else n for n in sizes["lengths"]]
    caches = [torch.full(shape, EMPTY).to(dtype) for _ in range(2)]
    for b, length in enumerate(lengths):
        for j in range(max(0, length - room), max(0, length)):
            for cache in caches:
                p, slot = place(table, b, j % room, shape[2])
                cache[p, :, slot] = torch.randn(kv_heads, depth).to(dtype)
    angles = torch.rand(3 * room, sizes["rotated"] // 2) * 6.3
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * depth).to(dtype)
    keywords = {n: options[n] for n in ("window", "softcap", "scale", "norm_offset") if n in options}
    if options.get("norm"):
        keywords |= {"q_norm": torch.randn(depth).to(dtype), "k_norm": torch.randn(depth).to(dtype)}
    if options.get("sinks"):
        keywords["sinks"] = torch.randn(heads)
    call = (qkv, *caches, torch.tensor(lengths, dtype=torch.int32), angles.cos(), angles.sin())
    return call, {"num_heads": heads, **keywords, **({} if table is None else {"block_table": table})}


def hold(call, keywords, level):
    qkv, k_cache, v_cache, *rest = call
    caches = k_cache.clone(), v_cache.clone()
    with torch.no_grad():
        o = rotary_cache_attention(qkv, *caches, *rest, **keywords, level=level)
    truth, *written = oracle(*call, **keywords)
    bound = 2e-5 if qkv.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(o.double(), truth, rtol=0, atol=bound * float(truth.abs().max().clamp(min=1.0)))
    for before, after, wanted in zip((k_cache, v_cache), caches, written, strict=True):
        changed = wanted != before.double()
        assert torch.equal(after[~changed], before[~changed]), "a slot was written that has no new key"
        torch.testing.assert_close(after.double(), wanted, rtol=2e-6 if qkv.dtype == torch.float32 else 1e-2, atol=1e-3)


@st.composite
def calls(draw, most):
    """Sizes and options of a call."""
    room = draw(st.integers(1, most))
    window = draw(st.sampled_from([None, None, 1, min(3, room), room // 2, room]))
    depth = draw(st.sampled_from([8, 16, 20, 34]))
    length = st.sampled_from([-1, 0, 1, room // 2, room - 1, room, 2 * room, 3 * room - 1, 3 * room])
    sizes = {
        "rows": draw(st.sampled_from([1, 2, 5])), "kv_heads": draw(st.integers(1, 2)), "room": room, "depth": depth,
        "group": draw(st.sampled_from([1, 2, 3, 8])), "page": draw(st.sampled_from([0, 0, 1, 4, 16])),
        "rotated": draw(st.sampled_from([2, 6, depth])), "seed": draw(st.integers(0, 2**31)),
    }  # fmt: skip
    sizes["lengths"] = [draw(length) for _ in range(sizes["rows"])]
    options = {"window": window or None, "norm": draw(st.booleans()), "sinks": draw(st.booleans())}
    options |= {"softcap": draw(st.sampled_from([None, 0.7])), "scale": draw(st.sampled_from([None, 0.3]))}
    return sizes, {**options, "norm_offset": draw(st.sampled_from([0.0, 1.0]))}


@pytest.mark.parametrize(
    ("level", "count", "most"),
    [
        ("reference", 25, 30),
        ("native", 25, 30),
        ("torchscript", 10, 30),
        ("triton", 8, 40),
        pytest.param("reference", 300, 60, marks=pytest.mark.slow),
        pytest.param("native", 300, 60, marks=pytest.mark.slow),
        pytest.param("triton", 150, 60, marks=pytest.mark.slow),
    ],
)
def test_drawn_combinations(level, count, most):
    available(level)

    @settings(max_examples=count, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(calls(most))
    def check(drawn):
        hold(*make(*drawn), level)

    check()


PLAIN = {"rows": 3, "kv_heads": 2, "group": 2, "room": 20, "depth": 16, "page": 0, "rotated": 16, "seed": 1}
VARIANTS = {
    "plain": ({}, {}),
    "ragged": ({"lengths": [0, 19, 7]}, {}),
    "inactive": ({"lengths": [-1, 5, 20]}, {}),
    "none is active": ({"lengths": [-1, -3, -(2**31)]}, {}),
    "window": ({}, {"window": 5}),
    "ring": ({"lengths": [19, 20, 57]}, {"window": 20}),
    "soft cap": ({}, {"softcap": 0.5}),
    "sinks": ({"lengths": [0, 5, -1]}, {"sinks": True}),
    "norms": ({}, {"norm": True}),
    "Gemma's norms": ({}, {"norm": True, "norm_offset": 1.0}),
    "partial rotation": ({"rotated": 6}, {}),
    "pages": ({"page": 8}, {}),
    "inactive pages": ({"page": 8, "lengths": [-1, 17, 24]}, {}),
    "ring of pages": ({"page": 4, "lengths": [57, 3, 20]}, {"window": 18}),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_variants(name, level, dtype):
    available(level, dtype)
    sizes, options = VARIANTS[name]
    hold(*make({**PLAIN, "lengths": [12, 4, 18], **sizes}, options, dtype), level)


@pytest.mark.parametrize("level", LEVELS)
def test_a_page_of_another_row_stays_when_no_row_is_active(level):
    """The table of an inactive row may name a page that another row writes in the same call."""
    available(level)
    (qkv, k, v, lengths, *turns), keywords = make({**PLAIN, "page": 8, "lengths": [-1, 3, -1]}, {})
    keywords["block_table"] = keywords["block_table"][1:2].expand(3, -1).contiguous()
    keywords["block_table"][2] = 2**30
    k, v = k.fill_(EMPTY), v.fill_(1.0)
    for slot in range(3):
        k[int(keywords["block_table"][1, 0]), :, slot] = torch.randn(2, 16)
    hold((qkv, k, v, lengths, *turns), keywords, level)


@pytest.mark.parametrize("level", LEVELS)
def test_a_page_that_does_not_exist_is_the_first_or_the_last(level):
    """Nothing beyond the cache is read or written, whatever a table says."""
    available(level)
    (qkv, k, v, lengths, *turns), keywords = make({**PLAIN, "page": 8, "lengths": [12, 4, 18]}, {})
    keywords["block_table"][0, 0], keywords["block_table"][2, 1] = -(2**30), 2**30
    caches = [cache.fill_(0.5) for cache in (k, v)]
    found = []
    for each in ("reference", level):
        copies = [cache.clone() for cache in caches]
        with torch.no_grad():
            o = rotary_cache_attention(qkv, *copies, lengths, *turns, **keywords, level=each)
        found.append((o, *copies))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("level", ["reference", "native", "torchscript"])
def test_a_strided_cache_is_written_where_it_lies(level):
    (qkv, *caches, lengths, cos, sin), keywords = make({**PLAIN, "lengths": [12, 4, 18]}, {})
    strided = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    with torch.no_grad():
        expected = rotary_cache_attention(qkv, *caches, lengths, cos, sin, **keywords, level=level)
        o = rotary_cache_attention(qkv, *strided, lengths, cos, sin, **keywords, level=level)
    torch.testing.assert_close(o, expected)
    assert all(map(torch.equal, strided, caches))


@pytest.mark.parametrize("level", LEVELS)
def test_steps_one_after_the_other_are_attention_of_the_sequence(level):
    """Filled to the last slot, token by token, it is causal attention of all tokens at once."""
    available(level)
    torch.manual_seed(0)
    tokens, heads, kv_heads, depth = 11, 4, 2, 16
    qkv, caches = torch.randn(tokens, (heads + 2 * kv_heads) * depth), [torch.full((1, 2, tokens, depth), EMPTY)] * 2
    caches = [cache.clone() for cache in caches]
    still = torch.ones(tokens, depth // 2), torch.zeros(tokens, depth // 2)
    with torch.no_grad():
        found = [
            rotary_cache_attention(qkv[t : t + 1], *caches, torch.tensor([t], dtype=torch.int32), *still,
                                   num_heads=heads, level=level)
            for t in range(tokens)
        ]  # fmt: skip
    q, k, v = (t.transpose(0, 1) for t in qkv.view(tokens, -1, depth).split((heads, kv_heads, kv_heads), 1))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(torch.cat(found), expected[0].transpose(0, 1).flatten(1))
    assert torch.equal(caches[1][0], v)
