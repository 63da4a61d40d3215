"""Decoding against a cache: drawn combinations, edges, memory that must not be read, errors, compilation.

The oracle is the formula for one query at a time in float64, with a page looked up for every key.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_pytorch.flash_attn_triton import flash_attention, flash_decode
from kernel_pytorch.flash_attn_triton.levels import LADDER

COMPILE = pytest.param("compile", marks=pytest.mark.slow)
LEVELS = ["reference", "native", "torchscript", COMPILE, "triton"]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


def available(level, dtype=torch.float32):
    reason = LADDER.unavailable(level, torch.device("cpu"), dtype)
    if reason is not None:
        pytest.skip(reason)


def make(batch, heads, kv_heads, queries, room, depth, lengths, page=0, dtype=torch.float32):
    """Queries, caches with tokens before heads, lengths, and a table of pages in no order, or None."""
    q, table = torch.randn(batch, heads, queries, depth).to(dtype), None
    count = -(-room // page) if page else 0
    shape = (batch * count + 2, page, kv_heads, depth) if page else (batch, room, kv_heads, depth)
    caches = [torch.randn(shape).to(dtype).transpose(1, 2) for _ in range(2)]
    if page:
        table = torch.randperm(shape[0])[: batch * count].view(batch, count).to(torch.int32)
    return q, *caches, torch.tensor(lengths, dtype=torch.int32), table


def keys_of(cache, table, b, length):
    """The first keys of a sequence `(Hkv, length, D)`; page numbers that do not exist are clamped."""
    if table is None:
        return cache[b, :, :length]
    size, last = cache.shape[2], cache.shape[0] - 1
    pages = [min(max(int(table[b, j // size]), 0), last) for j in range(length)]
    found = [cache[page, :, j % size] for j, page in enumerate(pages)]
    return torch.stack(found, 1) if found else cache.new_zeros(cache.shape[1], 0, cache.shape[3])


def oracle(
    q, k_cache, v_cache, lengths, table=None, causal=True, scale=None, window=None, softcap=None, alibi_slopes=None,
    sinks=None,
):  # fmt: skip
    q, k_cache, v_cache = (t.double() for t in (q, k_cache, v_cache))
    (batch, heads, queries, depth), group = q.shape, q.shape[1] // k_cache.shape[1]
    room, out = k_cache.shape[2] * (1 if table is None else table.shape[1]), torch.zeros_like(q)
    left, right = window or (-1, -1)
    for b in range(batch):
        length = min(max(int(lengths[b]), 0), room)
        keys, values = (keys_of(cache, table, b, length) for cache in (k_cache, v_cache))
        key = torch.arange(length)
        for h, i in torch.cartesian_prod(torch.arange(heads), torch.arange(queries)).tolist():
            position = length - queries + i
            s = keys[h // group] @ q[b, h, i] * (depth**-0.5 if scale is None else scale)
            s = s if softcap is None else softcap * torch.tanh(s / softcap)
            if alibi_slopes is not None:
                s = s - alibi_slopes.double().expand(batch, heads)[b, h] * (key - position).abs()
            sees = (key <= position) | (not causal)
            sees &= ((key >= position - left) | (left < 0)) & ((key <= position + right) | (right < 0))
            if not sees.any():
                continue
            s, v = s[sees], values[h // group][sees]
            if sinks is not None:
                s, v = torch.cat((s, sinks[h : h + 1].double())), torch.cat((v, v.new_zeros(1, depth)))
            out[b, h, i] = torch.softmax(s, 0) @ v
    return out


def hold(call, options, level, bound=None):
    if level == "native":
        options = {n: o for n, o in options.items() if n not in ("softcap", "alibi_slopes", "sinks")}
    found, truth = flash_decode(*call, **options, level=level), oracle(*call, **options)
    assert found.dtype == call[0].dtype
    bound = bound or (2e-5 if found.dtype == torch.float32 else 5e-3)
    if truth.numel():
        error = (found.double() - truth).abs().max() / truth.abs().max().clamp(min=1.0)
        assert error < bound, (level, options, error)


@st.composite
def calls(draw, most):
    """Shapes, lengths and options of a call."""
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 8, 17]))
    room, side = draw(st.integers(1, most)), st.sampled_from([-1, 0, 3, 64, 130])
    sizes = {
        "batch": batch, "heads": kv_heads * group, "kv_heads": kv_heads, "queries": draw(st.sampled_from([1, 1, 2, 5])),
        "room": room, "depth": draw(st.sampled_from([8, 16, 20, 33])),
        "lengths": [draw(st.sampled_from([0, 1, room // 2, room - 1, room])) for _ in range(batch)],
        "page": draw(st.sampled_from([0, 0, 1, 16, 50, 64])),
    }  # fmt: skip
    return sizes, {
        "causal": draw(st.booleans()),
        "window": draw(st.one_of(st.none(), st.tuples(side, side))),
        "softcap": draw(st.sampled_from([None, None, 0.5])),
        "alibi": draw(st.sampled_from([None, None, "heads", "batches"])),
        "sinks": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


def check(drawn, level, dtype=torch.float32):
    sizes, options = drawn
    options = dict(options)
    torch.manual_seed(options.pop("seed"))
    call, heads = make(**sizes, dtype=dtype), sizes["heads"]
    alibi, sinks = options.pop("alibi"), options.pop("sinks")
    if alibi:
        options["alibi_slopes"] = torch.rand((sizes["batch"], heads) if alibi == "batches" else (heads,))
    if sinks:
        options["sinks"] = torch.randn(heads)
    hold(call, options, level)


@pytest.mark.parametrize(
    ("level", "count", "most"),
    [("reference", 60, 150), ("native", 60, 150), ("torchscript", 15, 150), ("triton", 25, 400)],
)
def test_drawn(level, count, most):
    available(level)
    few = settings(
        max_examples=count, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    few(given(calls(most))(lambda drawn: check(drawn, level)))()


def test_half_precision_in_the_kernels():
    available("triton", torch.float16)
    for page in (0, 16):
        hold(make(2, 8, 1, 2, 300, 64, [300, 131], page=page, dtype=torch.float16), {"window": (140, -1)}, "triton")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("page", [0, 32])
def test_what_lies_behind_the_last_key_is_nothing(level, page):
    """NaN in keys and values, in whole pages too, and numbers of pages that do not exist."""
    available(level)
    q, k, v, lengths, table = make(3, 4, 2, 2, 256, 16, [0, 33, 128], page=page)
    clean = flash_decode(q, k, v, lengths, table, level=level)
    if table is None:
        behind = (torch.arange(256) >= lengths[:, None])[:, None, :, None]
        k, v = (cache.masked_fill(behind, float("nan")) for cache in (k, v))
    else:
        behind = torch.ones(k.shape[0], 32, dtype=torch.bool)
        for b, page_of in enumerate(table.tolist()):
            for place, number in enumerate(page_of):
                behind[number] = torch.arange(place * 32, place * 32 + 32) >= lengths[b]
            table[b, -(-int(lengths[b]) // 32) :] = 2**31 - 1
        k, v = (cache.masked_fill(behind[:, None, :, None], float("nan")) for cache in (k, v))
    dirty = flash_decode(q, k, v, lengths, table, level=level)
    torch.testing.assert_close(dirty, clean)
    assert not dirty[0].any()


@pytest.mark.parametrize("level", LEVELS)
def test_wild_lengths_and_page_numbers_are_clamped(level):
    available(level)
    for page in (0, 16):
        q, k, v, _, table = make(4, 2, 1, 1, 96, 16, [0] * 4, page=page)
        wild = torch.tensor([2**31 - 1, 97, -1, -(2**31)], dtype=torch.int32)
        if table is not None:
            table[0, :3] = torch.tensor([-1, -(2**31), 2**31 - 1])
        hold((q, k, v, wild, table), {}, level)
        tame = flash_decode(q, k, v, wild.clamp(0, 96), table, level=level)
        assert torch.equal(flash_decode(q, k, v, wild, table, level=level), tame)
        assert not tame[2:].any()


def test_no_address_outside_the_cache_is_read(monkeypatch):
    """The interpreter reads memory for real: every address that is loaded lies in a tensor of the call."""
    available("triton")
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    q, k, v, _, table = make(2, 2, 1, 1, 64, 16, [0, 0], page=16)
    table[:] = torch.tensor([2**30, -5, 7, 2**31 - 1])
    wild = torch.tensor([2**31 - 1, 1000], dtype=torch.int32)
    tensors = [t for t in (q, k, v, wild, table) if t is not None]
    spans = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors]
    original, read = interpreter.InterpreterBuilder.create_masked_load, []

    def watched(self, pointers, mask, *others):
        read.extend(pointers.data[mask.data.astype(bool)].ravel().tolist())
        return original(self, pointers, mask, *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", watched)
    monkeypatch.setattr("kernel_pytorch.flash_attn_triton.kernels.decode.splits_of", lambda *_: 1)
    from kernel_pytorch.flash_attn_triton._core.plans import forget_plans

    forget_plans()
    try:
        flash_decode(q, k, v, wild, table, level="triton")
    finally:
        forget_plans()
    assert read
    assert all(any(begin <= at < begin + size for begin, size in spans) for at in read)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(0, 2, 1, 16), (2, 2, 0, 16)], ids=["no sequence", "no query"])
def test_nothing_to_do(level, shape):
    available(level)
    k = torch.randn(shape[0], 2, 9, 16)
    lengths = torch.zeros(shape[0], dtype=torch.int32)
    assert flash_decode(torch.randn(shape), k, k, lengths, level=level).shape == shape


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("page", [0, 16])
def test_no_room_at_all(level, page):
    available(level)
    k, lengths = torch.randn(3, 2, page, 16), torch.ones(3, dtype=torch.int32)
    table = torch.zeros(3, 0, dtype=torch.int32) if page else None
    assert not flash_decode(torch.randn(3, 4, 1, 16), k, k, lengths, table, level=level).any()


@pytest.mark.parametrize("level", LEVELS)
def test_the_last_queries_of_flash_attention(level):
    """Whole sequences in the cache: what flash_attention gives for its last queries."""
    available(level)
    q, k, v = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 70, 16), torch.randn(2, 2, 70, 16)
    found = flash_decode(q, k, v, torch.full((2,), 70, dtype=torch.int32), window=(40, 0), level=level)
    torch.testing.assert_close(found, flash_attention(q, k, v, causal=True, window=(40, 0), level="reference"))


def test_strides_are_read_where_they_lie():
    """Slices of wider buffers, a head with gaps, vectors with steps."""
    available("triton")
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 4, 48)[:, 1:4:2, :, ::3], torch.randn(2, 90, 2, 40), torch.randn(2, 2, 90, 32)
    k, v = k[..., 8:24].transpose(1, 2), v[..., ::2]
    lengths = torch.tensor([90, 5, 33, 7], dtype=torch.int32)[::2]
    hold((q, k, v, lengths, None), {"sinks": torch.randn(4)[::2]}, "triton")
    paged = make(2, 2, 2, 1, 64, 16, [64, 20], page=16)
    steps = torch.stack((paged[4], paged[4] + 99), -1)[..., 0]
    assert not steps.is_contiguous()
    hold((*paged[:4], steps), {"alibi_slopes": torch.rand(2, 4)[:, ::2]}, "triton")


def test_splits():
    """One where programs are enough already, more for few of them, never more than there are keys for."""
    available("triton")
    from kernel_pytorch.flash_attn_triton.kernels.decode import splits_of

    cpu = torch.device("cpu")  # 16 programs in the interpreter
    assert [splits_of(programs, 10_000, cpu) for programs in (1, 8, 15, 16, 500)] == [16, 2, 2, 1, 1]
    assert [splits_of(1, room, cpu) for room in (1, 128, 129, 1000)] == [1, 1, 2, 8]


def test_with_one_split_nothing_is_combined(device):
    available("triton")
    from kernel_pytorch.harness.launches import count_launches

    for room, kernels in ((100, ["_decode_kernel"]), (300, ["_decode_kernel", "_combine_kernel"])):
        call = [t.to(device) for t in make(1, 2, 1, 1, room, 16, [room])[:4]]
        with count_launches() as launched:
            flash_decode(*call, level="triton")
        assert launched == kernels


Q, K = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8)
N, TABLE = torch.tensor([9, 3], dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


BAD = {
    "no tensor": ((None, K, K, N), {}, TypeError, "q: given NoneType"),
    "dimensions": ((Q, K[0], K, N), {}, ValueError, r"k_cache: shape is \(2, 9, 8\); it must be \(batch, heads, tok"),
    "pages": ((Q, K[0], K, N, TABLE), {}, ValueError, r"k_cache: shape .* it must be \(pages, heads, page size, head"),
    "dtypes": ((Q, K, K.half(), N), {}, TypeError, "v_cache: dtype is torch.float16; it must be that of q"),
    "integers": ((Q.int(), K, K, N), {}, TypeError, "q: dtype is torch.int32; allowed are"),
    "head size": ((Q, K[..., :4], K, N), {}, ValueError, "k_cache: head size is 4; it must be that of q, 8"),
    "values": ((Q, K, K[:, :, :3], N), {}, ValueError, "v_cache: shape is .* it must be that of k_cache"),
    "heads": ((Q[:, :3], K, K, N), {}, ValueError, "k_cache: 2 heads; their number must divide that of q, 3"),
    "batch": ((Q[:1], K, K, N[:1]), {}, ValueError, "k_cache: batch size is 2; it must be that of q, 1"),
    "device": ((Q, K, K.to("meta"), N), {}, ValueError, "v_cache: device is meta"),
    "lengths": ((Q, K, K, [9, 3]), {}, TypeError, "cache_seqlens: given list; it must be a tensor of torch.int32"),
    "lengths int64": (
        (Q, K, K, N.long()),
        {},
        TypeError,
        "cache_seqlens: given torch.int64; it must be .* torch.int32",
    ),
    "lengths shape": ((Q, K, K, N[:1]), {}, ValueError, r"cache_seqlens: shape is \(1,\); it must be \(batch,\), \(2,"),
    "lengths device": ((Q, K, K, N.to("meta")), {}, ValueError, "cache_seqlens: device is meta"),
    "table int64": ((Q, K, K, N, TABLE.long()), {}, TypeError, "block_table: given torch.int64; it must be a tensor"),
    "table shape": ((Q, K, K, N, TABLE[0]), {}, ValueError, r"block_table: shape is \(3,\); it must be \(batch, most"),
    "table batch": ((Q, K, K, N, TABLE[:1]), {}, ValueError, r"block_table: shape is \(1, 3\); .* batch 2"),
    "table device": ((Q, K, K, N, TABLE.to("meta")), {}, ValueError, "block_table: device is meta"),
    "no pages": ((Q, K[:0], K[:0], N, TABLE), {}, ValueError, "k_cache: given 0 pages; there must be at least 1"),
    "page size": (
        (Q, K[:, :, :0], K[:, :, :0], N, TABLE),
        {},
        ValueError,
        "k_cache: .* the page size must be at least",
    ),
    "causal": ((Q, K, K, N), {"causal": 1}, TypeError, "causal: given 1; it must be True or False"),
    "scale": ((Q, K, K, N), {"scale": float("nan")}, ValueError, "scale: given nan; it must be finite"),
    "window": ((Q, K, K, N), {"window": (-2, 0)}, ValueError, r"window: given \(-2, 0\); each side"),
    "soft cap": ((Q, K, K, N), {"softcap": -1.0}, ValueError, "softcap: given -1.0; it must be above 0"),
    "slopes": ((Q, K, K, N), {"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes: shape is \(3,\)"),
    "sinks": ((Q, K, K, N), {"sinks": torch.ones(2)}, ValueError, r"sinks: shape is \(2,\); it must be"),
    "level": ((Q, K, K, N), {"level": "fast"}, ValueError, "level: given 'fast'; allowed are None"),
    "no such level": ((Q, K, K, N), {"level": "cuda"}, ValueError, "'cuda' of flash_decode does not exist yet"),
    "native": ((Q, K, K, N), {"softcap": 1.0, "level": "native"}, RuntimeError, "cannot run here: softcap: PyTorch's"),
    "freed cache": ((Q, freed(K), K, N), {}, ValueError, "k_cache: shape is .* it was freed"),
    "freed lengths": ((Q, K, K, freed(N)), {}, ValueError, "cache_seqlens: shape is .* it was freed"),
    "freed table": ((Q, K, K, N, freed(TABLE)), {}, ValueError, "block_table: shape is .* it was freed"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    arguments, options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        flash_decode(*arguments, **options)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "sinks"])
@pytest.mark.parametrize("level", [None, "reference", "triton"])
def test_a_gradient_is_refused_by_name(name, level):
    given = {"q": Q, "k_cache": K, "v_cache": K, "sinks": torch.zeros(4)}
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(RuntimeError, match=rf"{name}: requires a gradient, and flash_decode has none; .*flash_attent"):
        flash_decode(cache_seqlens=N, **given, level=level)
    available(level or "reference")
    with torch.no_grad():
        flash_decode(cache_seqlens=N, **given, level=level)


def test_the_default_is_native_and_the_reference_for_what_native_lacks():
    called = []
    with LADDER.replaced("flash_decode", "native", lambda *_: called.append("native")):
        flash_decode(Q, K, K, N, window=(3, 0))
    with LADDER.replaced("flash_decode", "reference", lambda *_: called.append("reference")):
        flash_decode(Q, K, K, N, softcap=2.0)
    assert called == ["native", "reference"]
