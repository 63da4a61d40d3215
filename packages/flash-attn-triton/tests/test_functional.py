"""The public functions: what they compute at the edges, which level they choose, and what they refuse."""

import pytest
import torch

from kernel_pytorch.flash_attn_triton import (
    flash_attention,
    flash_attention_masked,
    flash_attention_varlen,
    flash_attention_with_lse,
)
from kernel_pytorch.flash_attn_triton._core import cuda_level
from kernel_pytorch.flash_attn_triton.levels import LADDER

COMPILE = pytest.param("compile", marks=pytest.mark.slow)  # seconds for each
LEVELS = ["reference", "native", "torchscript", COMPILE, "triton"]
LEVELS += ["cuda"] if cuda_level.cuda_ops is not None else []
WITH_LSE = ["reference", "torchscript", COMPILE, "triton"]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


def make(*shape, kv_heads=None, keys=None, dtype=torch.float32):
    batch, heads, queries, depth = shape
    of_keys = batch, kv_heads or heads, keys or queries, depth
    return [torch.randn(size).to(dtype).requires_grad_() for size in (shape, of_keys, of_keys)]


def skip_unless_available(level, dtype=torch.float32):
    reason = LADDER.unavailable(level, torch.device("cpu"), dtype)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("level", LEVELS)
def test_queries_that_see_no_key_give_zeros_and_no_gradient(level):
    skip_unless_available(level)
    q, k, v = make(1, 2, 40, 16, keys=9)
    o = flash_attention(q, k, v, causal=True, level=level)
    assert torch.equal(o[:, :, :31], torch.zeros_like(o[:, :, :31]))
    dq, dk, dv = torch.autograd.grad(o.sum(), (q, k, v))
    assert torch.equal(dq[:, :, :31], torch.zeros_like(dq[:, :, :31]))
    assert all(g.isfinite().all() for g in (dq, dk, dv))


@pytest.mark.parametrize("level", WITH_LSE)
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -2.0])])
def test_lse_of_nothing(level, sinks):
    """-inf, or the sink alone; with gradients of both outputs that are numbers."""
    skip_unless_available(level)
    q, k, v = make(1, 2, 40, 16, keys=9)
    o, lse = flash_attention_with_lse(q, k, v, causal=True, sinks=sinks, level=level)
    expected = torch.full((1, 2, 31), -float("inf")) if sinks is None else sinks[None, :, None].expand(1, 2, 31)
    torch.testing.assert_close(lse[:, :, :31], expected)
    assert lse[:, :, 31:].isfinite().all()
    gradients = torch.autograd.grad(o.sum() + lse[:, :, 31:].sum(), (q, k, v))
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("level", LEVELS)
def test_no_keys_at_all(level):
    skip_unless_available(level)
    q = torch.randn(2, 4, 3, 8)
    nothing = torch.randn(2, 2, 0, 8)
    assert torch.equal(flash_attention(q, nothing, nothing, level=level), torch.zeros_like(q))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (2, 2, 0, 16)], ids=["no batch", "no queries"])
def test_nothing_to_do(level, shape):
    skip_unless_available(level)
    q, k, v = make(*shape, keys=7)
    o = flash_attention(q, k, v, level=level)
    assert o.shape == shape
    assert all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(o.sum(), (q, k, v)))


@pytest.mark.parametrize("level", LEVELS)
def test_tokens_before_heads_are_read_where_they_lie(level):
    skip_unless_available(level)
    packed = torch.randn(2, 19, 3, 4, 16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    expected = flash_attention(*(t.contiguous() for t in (q, k, v)), level="reference")
    torch.testing.assert_close(flash_attention(q, k, v, level=level), expected)


@pytest.mark.parametrize("level", ["native", "triton"])
def test_windows(level):
    """All 0, one side open, wider than the sequence, beside causal, and None for -1."""
    skip_unless_available(level)
    q, k, v = make(1, 2, 45, 16, keys=50)
    for window, causal in [((0, 0), False), ((7, -1), False), ((None, 3), False), ((60, 60), True), ((4, 4), True)]:
        ours, expected = (
            flash_attention(q, k, v, window=window, causal=causal, level=at) for at in (level, "reference")
        )
        torch.testing.assert_close(ours, expected)


def test_the_same_seed_drops_the_same_weights_at_every_level():
    q, k, v = make(1, 2, 9, 8)
    one = torch.eye(8)[:1].expand(9, 8)
    same = [flash_attention(0 * q, k, one.expand(1, 2, 9, 8), dropout_p=0.5, seed=seed) for seed in (5, 5, 6)]
    assert torch.equal(same[0], same[1])
    assert not torch.equal(same[0], same[2])
    kept = 9 * same[0][..., 0] * 0.5  # each weight is 1/9; those that are kept count twice
    torch.testing.assert_close(kept, kept.round())
    drawn = [flash_attention(q, k, v, dropout_p=0.5) for _ in range(2)]
    assert not torch.equal(*drawn)


def test_the_default_is_native_and_the_reference_for_what_native_lacks(monkeypatch):
    q, k, v = make(1, 2, 5, 8)
    assert LADDER.default("flash_attention", q.device, q.dtype) == "native"
    called = []
    with LADDER.replaced("flash_attention", "native", lambda *_: called.append("native")):
        flash_attention(q, k, v, causal=True, window=(3, 0))
        flash_attention(q, k, v, deterministic=True)
    with LADDER.replaced("flash_attention", "reference", lambda *_: called.append("reference")):
        flash_attention(q, k, v, softcap=2.0)
        flash_attention(q, k, v, sinks=torch.zeros(2))
    assert called == ["native", "native", "reference", "reference"]


LACKING = {
    "native, soft cap": ({"softcap": 1.0, "level": "native"}, "'native' of flash_attention cannot run here: softcap:"),
    "native, sinks": ({"sinks": torch.zeros(4), "level": "native"}, "cannot run here: sinks: PyTorch's scaled_dot"),
    "native, ALiBi": ({"alibi_slopes": torch.ones(4), "level": "native"}, "cannot run here: alibi_slopes:"),
    "native, dropout": (
        {"dropout_p": 0.5, "level": "native"},
        "cannot run here: dropout_p: .* draws a mask",
    ),
    "torchscript, deterministic": (
        {"deterministic": True, "level": "torchscript"},
        "'torchscript' of flash_attention cannot run here: deterministic=True: TorchScript optimises",
    ),
    "cuda, window": ({"window": (3, 0), "level": "cuda"}, "'cuda' of flash_attention cannot run here: window:"),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_a_level_lacks_is_named(name):
    keywords, message = LACKING[name]
    with pytest.raises(RuntimeError, match=message):
        flash_attention(*make(1, 4, 5, 8), **keywords)


@pytest.mark.parametrize("level", ["reference", "native", COMPILE, "triton"])
@pytest.mark.parametrize("threads", [1, 2])
def test_deterministic_gradients_are_the_same_bits_each_time(level, threads):
    skip_unless_available(level)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        q, k, v = (torch.randn(5, heads, 16).requires_grad_() for heads in (4, 2, 2))
        starts, found = torch.tensor([0, 2, 2, 5], dtype=torch.int32), []
        for _ in range(4):
            y = flash_attention_varlen(q, k, v, starts, starts, 3, 3, causal=True, deterministic=True, level=level)
            found.append([y, *torch.autograd.grad(y.square().sum(), (q, k, v))])
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other))
    finally:
        torch.set_num_threads(before)


def test_what_triton_lacks_is_named():
    skip_unless_available("triton")
    with pytest.raises(RuntimeError, match="cannot run here: head size: the Triton kernels take head sizes up to 256"):
        flash_attention(*make(1, 1, 2, 257), level="triton")
    with pytest.raises(RuntimeError, match="cannot run here: float64: the Triton kernels take"):
        flash_attention(*make(1, 1, 2, 16, dtype=torch.float64), level="triton")


Q, K, V = (t.detach() for t in make(2, 4, 5, 8, kv_heads=2, keys=7))
BAD = {
    "no tensor": (lambda: flash_attention([1.0], K, V), TypeError, "q: given list"),
    "integers": (lambda: flash_attention(Q.int(), K, V), TypeError, "q: dtype is torch.int32; allowed are"),
    "dimensions": (lambda: flash_attention(Q[0], K, V), ValueError, r"q: shape is \(4, 5, 8\); it must be \(batch"),
    "dtypes": (lambda: flash_attention(Q, K.half(), V), TypeError, "k: dtype is torch.float16; it must be that of q"),
    "head sizes": (lambda: flash_attention(Q, K[..., :4], V), ValueError, "k: head size is 4; it must be that of q, 8"),
    "values": (lambda: flash_attention(Q, K, V[:, :, :3]), ValueError, r"v: shape is .* it must be that of k"),
    "heads": (lambda: flash_attention(Q[:, :3], K, V), ValueError, "k: 2 heads; their number must divide that of q, 3"),
    "batch": (lambda: flash_attention(Q[:1], K, V), ValueError, "k: batch size is 2; it must be that of q, 1"),
    "device": (lambda: flash_attention(Q, K.to("meta"), V), ValueError, "k: device is meta"),
    "scale": (lambda: flash_attention(Q, K, V, scale=float("inf")), ValueError, "scale: given inf; it must be finite"),
    "scale bool": (lambda: flash_attention(Q, K, V, scale=True), TypeError, "scale: given bool"),
    "window": (lambda: flash_attention(Q, K, V, window=(-2, 0)), ValueError, r"window: given \(-2, 0\); each"),
    "window number": (lambda: flash_attention(Q, K, V, window=3), ValueError, r"window: given 3; .* a pair"),
    "window float": (lambda: flash_attention(Q, K, V, window=(1.0, 0)), TypeError, "window: given float"),
    "soft cap": (lambda: flash_attention(Q, K, V, softcap=0.0), ValueError, "softcap: given 0.0; it must be above 0"),
    "large soft cap": (lambda: flash_attention(Q, K, V, softcap=1e39), ValueError, r"softcap: given 1e\+39; it must"),
    "causal": (lambda: flash_attention(Q, K, V, causal=1), TypeError, "causal: given 1; it must be True or False"),
    "deterministic": (lambda: flash_attention(Q, K, V, deterministic=None), TypeError, "deterministic: given None"),
    "slopes": (
        lambda: flash_attention(Q, K, V, alibi_slopes=torch.ones(3)), ValueError, r"alibi_slopes: shape is \(3,\)",
    ),
    "sinks": (lambda: flash_attention(Q, K, V, sinks=torch.ones(2)), ValueError, r"sinks: shape is \(2,\); it must be"),
    "dropout": (lambda: flash_attention(Q, K, V, dropout_p=1.0), ValueError, "dropout_p: given 1.0; it must"),
    "seed": (
        lambda: flash_attention(Q, K, V, dropout_p=0.1, seed=torch.tensor(1.0)), TypeError, "seed: given torch.float32",
    ),
    "level": (lambda: flash_attention(Q, K, V, level="fast"), ValueError, "level: given 'fast'; allowed are None"),
    "lse at native": (
        lambda: flash_attention_with_lse(Q, K, V, level="native"), RuntimeError, "lse: PyTorch's .* does not return it",
    ),
    "mask": (lambda: flash_attention_masked(Q, K, V, Q), ValueError, r"mask: shape is .* it must be \(2, 4, 5, 7\)"),
    "mask integers": (
        lambda: flash_attention_masked(Q, K, V, torch.ones(1, 1, 5, 7, dtype=torch.int32)), TypeError,
        r"mask: dtype is torch\.int32; it must be torch\.bool or a floating-point dtype",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("side", [2**31 - 1, 2**63 - 1, 2**63, 2**64])
def test_a_side_of_the_window_beyond_all_keys_is_no_limit(side, level):
    skip_unless_available(level)
    if level == "cuda":
        pytest.skip("level 'cuda' has no window")
    q, k, v = make(1, 2, 20, 16, keys=27)
    full = flash_attention(q, k, v, level="reference")
    for window in ((-1, side), (side, side), (side, -1)):
        o = flash_attention(q, k, v, window=window, level=level)
        torch.testing.assert_close(o, full)
        for found, wanted in zip(*(torch.autograd.grad(y.sum(), (q, k, v)) for y in (o, full)), strict=True):
            torch.testing.assert_close(found, wanted)
        full = flash_attention(q, k, v, level="reference")


@pytest.mark.parametrize("level", ["reference", "native", "torchscript", "triton"])
@pytest.mark.parametrize("rows", [slice(None), 2])
def test_a_mask_of_nan_is_no_mask(level, rows):
    skip_unless_available(level)
    q, k, v = make(1, 1, 6, 16)
    mask = torch.zeros(1, 1, 6, 6)
    mask[:, :, rows] = float("nan")
    o = flash_attention_masked(q, k, v, mask, level=level)
    assert o[:, :, rows].isnan().all()
    assert o.isnan().any(-1).sum() == mask[..., 0].isnan().sum()


@pytest.mark.parametrize("level", ["reference", "native", "torchscript", "triton"])
@pytest.mark.parametrize(("dtype", "bias"), [(torch.float16, 7e4), (torch.bfloat16, 57.3)])
def test_a_mask_keeps_its_dtype(dtype, bias, level):
    """Rounded to that of q it would be infinite, or off by a quarter."""
    skip_unless_available(level, dtype)
    q, k, v = make(1, 1, 8, 16, dtype=dtype)
    mask = torch.zeros(1, 1, 8, 8).requires_grad_()
    with torch.no_grad():
        mask[..., 0], mask[..., 1] = bias, bias + 0.11
    o = flash_attention_masked(q, k, v, mask, level=level)
    exact = flash_attention_masked(*(t.double() for t in (q, k, v, mask)), level="reference")
    torch.testing.assert_close(o.double(), exact, atol=0.02, rtol=0.0)
    (dmask,) = torch.autograd.grad(o.float().sum(), mask)
    assert dmask.dtype == torch.float32
    assert dmask.isfinite().all()


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
def test_a_seed_of_more_than_64_bits_is_refused(seed):
    q, k, v = make(1, 1, 4, 16)
    with pytest.raises(ValueError, match=f"seed: given {seed}"):
        flash_attention(q, k, v, dropout_p=0.5, seed=seed)


@pytest.mark.slow
def test_an_integer_seed_may_be_compiled():
    """As a constant of the graph it made TorchInductor write Philox's rounds into each other without end."""
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    compiled = torch.compile(lambda *t: flash_attention(*t, dropout_p=0.5, seed=9, level="reference"), fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), flash_attention(q, k, v, dropout_p=0.5, seed=9, level="reference"))
