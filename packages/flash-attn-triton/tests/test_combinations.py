"""Every feature with every other: drawn at random, forward and gradients against float64.

The definition itself is held against a loop over queries, written from the formula. The ordinary suite draws a few; the
slow tests draw many.
"""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernel_pytorch.flash_attn_triton import flash_attention as attend
from kernel_pytorch.flash_attn_triton import flash_attention_masked, flash_attention_varlen, flash_attention_with_lse
from kernel_pytorch.flash_attn_triton.levels import LADDER, reference

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


@st.composite
def calls(draw, most=70, batches=2, heads=3):
    """Shapes and options of a call: at most so many queries, keys, batches, heads of keys and heads in a group."""
    kv_heads, group = draw(st.integers(1, heads)), draw(st.integers(1, heads))
    side = st.sampled_from([-1, 0, 1, 5, 31, 64])
    return {
        "sizes": (draw(st.integers(1, batches)), kv_heads * group, kv_heads, draw(st.integers(1, most)),
                  draw(st.integers(0, most)), draw(st.sampled_from([8, 16, 20, 33]))),
        "causal": draw(st.booleans()),
        "window": draw(st.one_of(st.none(), st.tuples(side, side))),
        "softcap": draw(st.sampled_from([None, None, 0.5, 3.0])),
        "alibi": draw(st.sampled_from([None, "heads", "batches"])),
        "sinks": draw(st.booleans()),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "mask": draw(st.sampled_from([None, None, "bool", "float"])),
        "broadcast": [draw(st.booleans()) for _ in range(4)],
        "transposed": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }  # fmt: skip


def run(call, level, dtype, with_lse):
    """Outputs and gradients of a call, with the same numbers whatever the dtype."""
    torch.manual_seed(call["seed"])
    batch, heads, kv_heads, queries, keys, depth = call["sizes"]
    shapes = (batch, heads, queries, depth), (batch, kv_heads, keys, depth), (batch, kv_heads, keys, depth)
    leaves = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    if call["transposed"]:
        leaves = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in leaves]
    options = {name: call[name] for name in ("causal", "window", "softcap", "dropout_p")}
    options["seed"] = call["seed"]
    sinks = torch.randn(heads, dtype=torch.float64).to(dtype)
    slopes = torch.rand((batch, heads) if call["alibi"] == "batches" else (heads,), dtype=torch.float64).to(dtype)
    mask = torch.randn(
        [1 if one else n for one, n in zip(call["broadcast"], (batch, heads, queries, keys), strict=True)]
    )
    incoming = [torch.randn(shapes[0], dtype=torch.float64), torch.randn(shapes[0][:-1], dtype=torch.float64)]
    leaves = [t.detach().requires_grad_() for t in leaves]
    if call["sinks"]:
        leaves.append(sinks.requires_grad_())
        options["sinks"] = sinks
    if call["mask"] is not None:
        mask = mask > -0.5 if call["mask"] == "bool" else mask.to(dtype).requires_grad_()
        leaves += [mask] if call["mask"] == "float" else []
        outputs = (flash_attention_masked(*leaves[:3], mask, **options, level=level),)
    else:
        options["alibi_slopes"] = slopes if call["alibi"] else None
        found = (flash_attention_with_lse if with_lse else attend)(*leaves[:3], **options, level=level)
        outputs = found if with_lse else (found,)
    gradients = [g.to(dtype) for g in incoming][: len(outputs)]
    if len(outputs) == 2:
        gradients[1] = gradients[1].masked_fill(outputs[1] == -math.inf, 0.0)
    return [*outputs, *torch.autograd.grad(outputs, leaves, gradients)]


def check(call, level, bound=2e-5):
    """Compare a level with the definition in float64; the scale of an error is that of the tensor."""
    if level == "native":
        call = {**call, "softcap": None, "alibi": None, "sinks": False, "dropout_p": 0.0}
    with_lse = level != "native" and call["seed"] % 4 != 0
    ours, truth = run(call, level, torch.float32, with_lse), run(call, "reference", torch.float64, with_lse)
    for i, (a, b) in enumerate(zip(ours, truth, strict=True)):
        if b.numel() == 0:
            continue
        nothing = b == -math.inf
        assert torch.equal(a == -math.inf, nothing), (level, call, i)
        a, b = a.double().masked_fill(nothing, 0.0), b.masked_fill(nothing, 0.0)
        error = (a - b).abs().max() / b.abs().max().clamp(min=1.0)
        assert error < bound, (level, call, i, error)


def row_by_row(call):
    """The formula for one query at a time, in Python: the pitfall that the page names, and an oracle of the oracle."""
    torch.manual_seed(call["seed"])
    batch, heads, kv_heads, queries, keys, depth = call["sizes"]
    q = torch.randn(batch, heads, queries, depth, dtype=torch.float64)
    k, v = (torch.randn(batch, kv_heads, keys, depth, dtype=torch.float64) for _ in range(2))
    slopes, sinks = torch.rand(heads, dtype=torch.float64), torch.randn(heads, dtype=torch.float64)
    window, softcap = call["window"] or (-1, -1), call["softcap"]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf, dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in (batch, heads, queries))).tolist():
        position, terms = i + keys - queries, []
        for j in range(keys):
            left, right = window
            if (left >= 0 and j < position - left) or (right >= 0 and j > position + right):
                continue
            if call["causal"] and j > position:
                continue
            s = float(q[b, h, i] @ k[b, h // (heads // kv_heads), j]) * 0.3
            s = s if softcap is None else softcap * math.tanh(s / softcap)
            terms.append((s - (float(slopes[h]) * abs(position - j) if call["alibi"] else 0.0), j))
        total = sum(math.exp(s) for s, _ in terms) + (math.exp(float(sinks[h])) if call["sinks"] else 0.0)
        if total > 0.0:
            lse[b, h, i] = math.log(total)
        for s, j in terms:
            out[b, h, i] += math.exp(s) / total * v[b, h // (heads // kv_heads), j]
    options = {name: call[name] for name in ("causal", "window", "softcap")}
    slopes, sinks = slopes if call["alibi"] else None, sinks if call["sinks"] else None
    found = flash_attention_with_lse(
        q, k, v, scale=0.3, alibi_slopes=slopes, sinks=sinks, level="reference", **options
    )  # fmt: skip
    torch.testing.assert_close(found, (out, lse), rtol=1e-10, atol=1e-10)


def drawn(count):
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip


def available(level):
    reason = LADDER.unavailable(level, torch.device("cpu"), torch.float32)
    if reason is not None:
        pytest.skip(reason)


@drawn(60)
@given(call=calls(most=9))
def test_the_definition_is_the_formula(call):
    row_by_row(call)


@pytest.mark.parametrize(("level", "count"), [("native", 500), ("reference", 500), ("torchscript", 40)])
def test_levels_of_pytorch(level, count):
    drawn(count)(given(call=calls())(lambda call: check(call, level)))()


@pytest.mark.parametrize(
    ("most", "count"), [(12, 30), *(pytest.param(n, 125, marks=pytest.mark.slow) for n in (12, 17, 24, 33))]
)
def test_triton(most, count):
    """500 in all: another size draws other numbers."""
    available("triton")
    drawn(count)(given(call=calls(most, batches=1, heads=2))(lambda call: check(call, "triton")))()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["native", "reference", "torchscript", "triton"])
def test_many(level):
    available(level)
    drawn(5000)(given(call=calls(most=130))(lambda call: check(call, level)))()


@pytest.mark.slow
def test_compiled():
    """Each is compiled anew, which takes seconds."""

    def compiled(call):
        torch._dynamo.reset()
        check(call, "compile")

    drawn(20)(given(call=calls())(compiled))()


LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=4)


def check_packed(level, lengths, causal, window, seed):
    """Packed sequences are the same as each on its own."""
    torch.manual_seed(seed)
    of_q, of_k = ([0, *torch.tensor(n).cumsum(0).tolist()] for n in zip(*lengths, strict=True))
    q, k, v = (torch.randn(n[-1], heads, 16, requires_grad=True) for n, heads in ((of_q, 4), (of_k, 2), (of_k, 2)))
    starts = [torch.tensor(n, dtype=torch.int32) for n in (of_q, of_k)]
    longest = [max(b - a for a, b in zip(n, n[1:], strict=False)) for n in (of_q, of_k)]  # noqa: RUF007
    options = {"causal": causal, "window": window}
    ours = flash_attention_varlen(q, k, v, *starts, *longest, **options, level=level)
    parts = []
    for a, b, c, d in zip(of_q, of_q[1:], of_k, of_k[1:], strict=False):
        one = (t.double().transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
        parts.append(reference.flash_attention(*one, causal, None, window, None, None, None, 0.0, None, False))
    truth = torch.cat([part[0].transpose(0, 1) for part in parts])
    do = torch.randn_like(ours)
    for a, b in zip(
        (ours, *torch.autograd.grad(ours, (q, k, v), do)),
        (truth, *torch.autograd.grad(truth, (q, k, v), do.double())),
        strict=True,
    ):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("level", "count"), [("reference", 30), ("native", 30), ("triton", 3)])
def test_packed_sequences(level, count):
    available(level)
    window = st.sampled_from([None, (3, 2), (0, 0), (-1, 4), (9, -1)])

    def one(lengths, causal, window, seed):
        check_packed(level, lengths, causal, window, seed)

    drawn(count)(given(LENGTHS, st.booleans(), window, st.integers(0, 99))(one))()
