"""The public functions: what they compute at the edges, which level they choose, and what they refuse."""

import math

import pytest
import torch

from kernel_pytorch.fused_decode import linear_residual, norm_gated_linear, norm_linear, rotary_cache_attention
from kernel_pytorch.fused_decode.levels import LADDER, PRODUCTS

COMPILE = pytest.param("compile", marks=pytest.mark.slow)
LEVELS = ["reference", "native", "torchscript", COMPILE, "triton"]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


def available(level, dtype=torch.float32):
    reason = LADDER.unavailable(level, torch.device("cpu"), dtype)
    if reason is not None:
        pytest.skip(reason)


def make(*shape, outputs=24, parts=1, dtype=torch.float32):
    """Rows, a weight, a norm's weight, its bias, a bias and a residual."""
    torch.manual_seed(sum(shape))
    inner = shape[-1]
    found = (
        torch.randn(shape), torch.randn(parts * outputs, inner) * inner**-0.5, 1.0 + 0.2 * torch.randn(inner),
        torch.randn(inner), torch.randn(parts * outputs), torch.randn(*shape[:-1], outputs),
    )  # fmt: skip
    return [t.to(dtype) for t in found]


def exact(x, weight, norm_weight, norm_bias, bias, norm, offset, eps=1e-6):
    """`norm(x) @ weight.T + bias` in float64, written from PyTorch's documentation."""
    x, weight, norm_weight = x.double(), weight.double(), norm_weight.double() + offset
    if norm == "rms":
        n = torch.nn.functional.rms_norm(x, x.shape[-1:], norm_weight, eps)
    else:
        n = torch.nn.functional.layer_norm(
            x, x.shape[-1:], norm_weight, None if norm_bias is None else norm_bias.double(), eps
        )
    return torch.nn.functional.linear(n, weight, None if bias is None else bias.double())


def hold(found, truth):
    bound = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[found.dtype]
    torch.testing.assert_close(found.double(), truth, rtol=0, atol=bound * float(truth.abs().max()))


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@torch.no_grad()
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 48), (1, 48), (2, 1, 33)], ids=str)
def test_a_linear_layer_of_a_norm(shape, dtype, level):
    available(level, dtype)
    for norm, biased, offset in (("rms", False, 0.0), ("rms", True, 1.0), ("layer", True, 0.0), ("layer", False, 0.0)):
        x, weight, norm_weight, norm_bias, bias, _ = make(*shape, dtype=dtype)
        bias, norm_bias = bias if biased else None, norm_bias if biased and norm == "layer" else None
        found = norm_linear(
            x, weight, norm_weight, bias, norm=norm, norm_bias=norm_bias, norm_offset=offset, level=level
        )
        assert (found.shape, found.dtype) == ((*shape[:-1], 24), dtype)
        hold(found, exact(x, weight, norm_weight, norm_bias, bias, norm, offset))


@torch.no_grad()
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gated_linear_layer_of_a_norm(activation, dtype, level):
    available(level, dtype)
    act = {
        "silu": torch.nn.SiLU(), "gelu": torch.nn.GELU(), "gelu_tanh": torch.nn.GELU(approximate="tanh")
    }[activation]  # fmt: skip
    for shape, biased in (((5, 48), False), ((1, 40), True), ((2, 3, 33), True)):
        x, weight, norm_weight, _, bias, _ = make(*shape, parts=2, dtype=dtype)
        bias = bias if biased else None
        found = norm_gated_linear(x, weight, norm_weight, bias, activation=activation, level=level)
        assert (found.shape, found.dtype) == ((*shape[:-1], 24), dtype)
        gate, up = exact(x, weight, norm_weight, None, bias, "rms", 0.0).chunk(2, -1)
        hold(found, act(gate) * up)


@torch.no_grad()
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_layer_and_a_residual(dtype, level):
    available(level, dtype)
    for shape, biased in (((5, 48), False), ((1, 40), True), ((2, 3, 33), True)):
        x, weight, _, _, bias, residual = make(*shape, dtype=dtype)
        bias, before = bias if biased else None, residual.clone()
        found = linear_residual(x, weight, residual, bias, level=level)
        truth = residual.double() + x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert found.dtype == dtype
        hold(found, truth)
        assert torch.equal(residual, before)


@torch.no_grad()
@pytest.mark.parametrize("level", LEVELS)
def test_no_rows(level):
    available(level)
    x, weight, norm_weight, _, _, residual = make(0, 16)
    assert norm_linear(x, weight, norm_weight, level=level).shape == (0, 24)
    assert norm_gated_linear(x, weight, norm_weight, level=level).shape == (0, 12)
    assert linear_residual(x, weight, residual, level=level).shape == (0, 24)
    cache, lengths, turns = torch.empty(0, 2, 9, 8), torch.empty(0, dtype=torch.int32), torch.randn(9, 4)
    o = rotary_cache_attention(
        torch.empty(0, 64), cache, cache.clone(), lengths, turns, turns, num_heads=4, level=level
    )
    assert o.shape == (0, 32)


@torch.no_grad()
@pytest.mark.parametrize("level", ["reference", "triton"])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16])
def test_the_bits_of_a_row_do_not_depend_on_the_others(rows, level):
    """Neither on what they hold nor on how many there are, except that one or two have another kernel than more."""
    available(level)
    x, weight, norm_weight, _, _, residual = make(16, 80)
    call = {"num_heads": 4, "level": level}
    qkv, caches, turns = torch.randn(16, 128), [torch.randn(16, 2, 20, 16) for _ in range(2)], torch.randn(20, 8)
    lengths = torch.arange(16, dtype=torch.int32)
    functions = {
        "norm_linear": lambda k, x: norm_linear(x, weight, norm_weight, level=level),
        "norm_gated_linear": lambda k, x: norm_gated_linear(x, weight, norm_weight, level=level),
        "linear_residual": lambda k, x: linear_residual(x, weight, residual[:k], level=level),
    }
    most = 2 if rows < 3 else 16
    for name, function in functions.items():
        whole = function(most, x[:most])
        others = torch.cat((x[:1], 100.0 * torch.randn(most - 1, 80)))
        assert torch.equal(function(most, others)[0], whole[0]), name
        if level == "triton":  # PyTorch's products add in another order where there are fewer rows
            assert torch.equal(function(rows, x[:rows]), whole[:rows]), name
    whole = rotary_cache_attention(qkv, *(c.clone() for c in caches), lengths, turns, turns, **call)
    part = [t[:rows].clone() for t in (qkv, *caches, lengths)]
    part[1][1:], part[2][1:] = float("nan"), float("nan")
    found = rotary_cache_attention(*part, turns, turns, **call)
    assert torch.equal(found[0], whole[0])
    assert rows == 1 or found[1:].isnan().any()


@torch.no_grad()
def test_float16_does_not_overflow_inside():
    """Sums of squares of these, and their products before the norm, are beyond float16."""
    available("triton", torch.float16)
    for rows in (1, 4):
        x, weight, norm_weight, *_ = make(rows, 64, dtype=torch.float16)
        x = x * 1e4
        for level in ("native", "triton"):
            hold(
                norm_linear(x, weight, norm_weight, level=level), exact(x, weight, norm_weight, None, None, "rms", 0.0)
            )


def test_the_default_is_native_on_a_cpu():
    x, weight, norm_weight, *_ = make(3, 16)
    for function in (*PRODUCTS, "rotary_cache_attention"):
        assert LADDER.default(function, x.device, x.dtype) == "native"
    with torch.no_grad():
        ours = norm_linear(x, weight, norm_weight)
        assert torch.equal(ours, norm_linear(x, weight, norm_weight, level="native"))


def test_the_default_on_a_gpu_is_triton_where_it_was_measured_or_native_copies_the_cache(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr("kernel_pytorch.fused_decode._core.levels.compute_capability", lambda device: (9, 0))
    assert LADDER.default("rotary_cache_attention", gpu, torch.bfloat16) == "triton"
    for feature in ("float64", "head size", "strided cache"):
        assert LADDER.default("rotary_cache_attention", gpu, torch.bfloat16, features=(feature,)) == "native"
    for dtype, level in ((torch.bfloat16, "triton"), (torch.float16, "triton"), (torch.float32, "native")):
        assert LADDER.default("norm_linear", gpu, dtype) == level
    monkeypatch.setattr("kernel_pytorch.fused_decode._core.levels.compute_capability", lambda device: (8, 0))
    assert LADDER.default("rotary_cache_attention", gpu, torch.bfloat16) == "triton"
    assert LADDER.default("norm_linear", gpu, torch.bfloat16) == "native"
    monkeypatch.setattr("kernel_pytorch.fused_decode._core.levels.compute_capability", lambda device: (7, 5))
    assert LADDER.default("rotary_cache_attention", gpu, torch.bfloat16) == "native"


@pytest.mark.parametrize("level", [None, "reference", "native", "triton"])
def test_a_gradient_is_refused_and_what_has_one_is_named(level):
    available(level or "native")
    x, weight, norm_weight, _, bias, residual = make(3, 16)
    trained = torch.nn.Parameter(weight)
    calls = {
        "weight.*norm_linear is for generation.*kernel_pytorch.rmsnorm": lambda: norm_linear(
            x, trained, norm_weight, level=level
        ),
        "weight.*train with .*fused_ln_act": lambda: norm_gated_linear(x, trained, norm_weight, level=level),
        "x: requires a gradient": lambda: linear_residual(x.clone().requires_grad_(), weight, residual, level=level),
        "bias: requires": lambda: linear_residual(x, weight, residual, bias.clone().requires_grad_(), level=level),
        "q_norm: .*flash_attn_triton": lambda: attend(q_norm=ROW.clone().requires_grad_(), k_norm=ROW, level=level),
    }
    for message, call in calls.items():
        with pytest.raises(RuntimeError, match=message):
            call()
        with torch.no_grad():
            assert not call().requires_grad
    with torch.inference_mode():
        assert norm_linear(x, trained, norm_weight, level=level).shape == (3, 24)


X, W, N, NB, B, R = make(3, 16)
QKV, K, V, ROW = torch.randn(3, 64), torch.randn(3, 2, 9, 8), torch.randn(3, 2, 9, 8), torch.ones(8)
LENGTHS, TURNS = torch.tensor([3, 0, 8], dtype=torch.int32), torch.randn(9, 4)
TABLE = torch.zeros(3, 2, dtype=torch.int32)


def attend(qkv=QKV, k=K, v=V, lengths=LENGTHS, cos=TURNS, sin=TURNS, **options):
    caches = [t.clone() if isinstance(t, torch.Tensor) and t.is_contiguous() else t for t in (k, v)]
    return rotary_cache_attention(qkv, *caches, lengths, cos, sin, **{"num_heads": 4, **options})


MANY = torch.randn(17, 16)
BAD = {
    "rows": (lambda: norm_linear(MANY, W, N), ValueError, "x: 17 rows; norm_linear takes at most 16.*rmsnorm"),
    "rows, gated": (lambda: norm_gated_linear(MANY, W, N), ValueError, "x: 17 rows.*kernel_pytorch.fused_ln_act"),
    "rows, residual": (
        lambda: linear_residual(MANY, W, torch.ones(17, 24)), ValueError, "x: 17 rows.*torch.nn.functional.linear",
    ),
    "rows in all": (lambda: norm_linear(torch.randn(6, 3, 16), W, N), ValueError, "x: 18 rows"),
    "rows of attention": (
        lambda: attend(torch.randn(17, 64), *[torch.randn(17, 2, 9, 8)] * 2), ValueError, "v_cache: it is k_cache|rows",
    ),
    "one cache": (
        lambda: rotary_cache_attention(QKV, K, K, LENGTHS, TURNS, TURNS, num_heads=4),
        ValueError, "v_cache: it is k_cache; it must be another tensor",
    ),
    "rows of pages": (
        lambda: attend(torch.randn(17, 64), lengths=LENGTHS.repeat(6)[:17], block_table=TABLE.repeat(6, 1)[:17]),
        ValueError, "qkv: 17 rows; rotary_cache_attention.*qkv_fusion and kernel_pytorch.flash_attn_triton",
    ),
    "no tensor": (lambda: norm_linear([1.0], W, N), TypeError, "x: given list"),
    "integers": (lambda: norm_linear(X.int(), W, N), TypeError, "x: dtype is torch.int32; allowed"),
    "weight": (lambda: norm_linear(X, W[:, :8], N), ValueError, r"weight: shape is \(24, 8\); for x .*\(outputs, 16\)"),
    "weight rank": (lambda: norm_linear(X, W[0], N), ValueError, r"weight: shape is \(16,\)"),
    "weight dtype": (lambda: norm_linear(X, W.half(), N), TypeError, "weight: dtype is torch.float16; it must be that"),
    "no weight": (lambda: norm_linear(X, None, N), TypeError, "weight: given NoneType"),
    "no norm weight": (lambda: norm_linear(X, W, None), TypeError, "norm_weight: given None"),
    "norm weight": (lambda: norm_linear(X, W, N[:8]), ValueError, r"norm_weight: shape is \(8,\)"),
    "odd": (lambda: norm_gated_linear(X, W[:23], N), ValueError, "weight: .* an even number of rows"),
    "bias": (lambda: norm_linear(X, W, N, B[:3]), ValueError, r"bias: shape is \(3,\); it must be .*\(24,\)"),
    "bias of a gate": (lambda: norm_gated_linear(X, W, N, B[:12]), ValueError, r"bias: .*\(24,\)"),
    "device": (lambda: norm_linear(X, W.to("meta"), N), ValueError, "weight: device is meta"),
    "norm": (lambda: norm_linear(X, W, N, norm="batch"), ValueError, "norm: given 'batch'; allowed are 'rms', 'layer'"),
    "norm bias": (lambda: norm_linear(X, W, N, norm_bias=NB), ValueError, "norm_bias: given a tensor; norm 'rms' has"),
    "eps": (lambda: norm_linear(X, W, N, eps=-1.0), ValueError, "eps: given -1.0"),
    "offset": (lambda: norm_linear(X, W, N, norm_offset=math.nan), ValueError, "norm_offset: given nan"),
    "activation": (lambda: norm_gated_linear(X, W, N, activation="relu"), ValueError, "activation: given 'relu'"),
    "residual": (lambda: linear_residual(X, W, R[:2]), ValueError, r"residual: shape is \(2, 24\); .*\(3, 24\)"),
    "no residual": (lambda: linear_residual(X, W, None), TypeError, "residual: given None"),
    "residual dtype": (lambda: linear_residual(X, W, R.half()), TypeError, "residual: dtype is torch.float16"),
    "level": (lambda: norm_linear(X, W, N, level="fast"), ValueError, "level: given 'fast'; allowed are None"),
    "no cuda": (lambda: norm_linear(X, W, N, level="cuda"), ValueError, "level: 'cuda' of norm_linear does not exist"),
    "qkv": (lambda: attend(QKV[:, :63]), ValueError, r"qkv: shape is \(3, 63\); it must be \(rows, 64\) for 4 heads"),
    "cache": (lambda: attend(k=K[0]), ValueError, r"k_cache: shape is \(2, 9, 8\); it must be \(rows, KV heads"),
    "caches": (lambda: attend(v=V[:, :, :3]), ValueError, r"v_cache: shape is .* that of k_cache"),
    "cache dtype": (lambda: attend(v=V.half()), TypeError, "v_cache: dtype is torch.float16"),
    "cache rows": (lambda: attend(k=K[:2], v=V[:2]), ValueError, "k_cache: .* it must have the 3 rows of qkv"),
    "expanded": (lambda: attend(k=K[:1].expand(3, 2, 9, 8)), ValueError, "k_cache: stride is .* must not be expanded"),
    "heads": (lambda: attend(num_heads=3), ValueError, "num_heads: given 3; it must be a multiple of the 2 heads"),
    "heads float": (lambda: attend(num_heads=4.0), TypeError, "num_heads: given float"),
    "lengths dtype": (lambda: attend(lengths=LENGTHS.long()), TypeError, "lengths: given torch.int64"),
    "lengths": (lambda: attend(lengths=LENGTHS[:2]), ValueError, r"lengths: shape is \(2,\)"),
    "cos dtype": (lambda: attend(cos=TURNS.half()), TypeError, "cos: dtype is torch.float16; it must be torch.float32"),
    "cos": (lambda: attend(cos=TURNS.repeat(1, 2)), ValueError, r"cos: shape is \(9, 8\); .*\(positions, 1 to"),
    "sin": (lambda: attend(sin=TURNS[:5]), ValueError, "sin: shape is .* that of cos"),
    "window": (lambda: attend(window=10), ValueError, "window: given 10; it must be 1 to 9, the slots"),
    "no window": (lambda: attend(window=0), ValueError, "window: given 0"),
    "window float": (lambda: attend(window=3.0), TypeError, "window: given float"),
    "soft cap": (lambda: attend(softcap=0.0), ValueError, "softcap: given 0.0; it must be above 0"),
    "scale": (lambda: attend(scale=math.inf), ValueError, "scale: given inf"),
    "one norm": (lambda: attend(q_norm=ROW), ValueError, "k_norm: given None; give both"),
    "norm of heads": (lambda: attend(q_norm=ROW[:4], k_norm=ROW), ValueError, r"q_norm: shape is \(4,\)"),
    "sinks": (lambda: attend(sinks=ROW), ValueError, r"sinks: shape is \(8,\); it must be \(num_heads,\), \(4,\)"),
    "table dtype": (lambda: attend(block_table=TABLE.long()), TypeError, "block_table: given torch.int64"),
    "table": (lambda: attend(block_table=TABLE[:2]), ValueError, r"block_table: shape is \(2, 2\)"),
    "no pages": (lambda: attend(k=K[:0], v=V[:0], block_table=TABLE), ValueError, r"k_cache: .*none of them 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


LACKING = {
    "float64": lambda: norm_linear(X.double(), W.double(), N.double(), level="triton"),
    "head size": lambda: attend(torch.ones(3, 8 * 258), *(torch.ones(3, 2, 4, 258) for _ in "kv"), level="triton"),
    "strided cache": lambda: attend(k=K.transpose(1, 2).contiguous().transpose(1, 2), level="triton"),
}


@pytest.mark.parametrize("name", LACKING)
def test_what_triton_lacks_is_named(name):
    available("triton")
    with pytest.raises(RuntimeError, match=f"level 'triton' of .* cannot run here: {name}: "):
        LACKING[name]()


def test_autocast_casts_as_a_linear_layer_is_cast():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for function, given in ((norm_linear, (X, W, N, B)), (linear_residual, (X, W, R, B))):
            found = function(*given)
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.float(), function(*given, level="reference").float(), rtol=0.02, atol=0.05)
    assert norm_linear(X, W, N).dtype == torch.float32


def freed(*shape, dtype=torch.float32):
    tensor = torch.zeros(shape, dtype=dtype)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("level", [None, "reference", "native", "triton"])
def test_memory_that_was_freed_is_refused(level):
    calls = {
        "weight": lambda: norm_linear(X, freed(24, 16), N, level=level),
        "norm_weight": lambda: norm_gated_linear(X, W, freed(16), level=level),
        "residual": lambda: linear_residual(X, W, freed(3, 24), level=level),
        "v_cache": lambda: rotary_cache_attention(
            QKV, K.clone(), freed(3, 2, 9, 8), LENGTHS, TURNS, TURNS, num_heads=4, level=level
        ),
        "lengths": lambda: attend(lengths=freed(3, dtype=torch.int32), level=level),
        "block_table": lambda: attend(block_table=freed(3, 2, dtype=torch.int32), level=level),
        "sinks": lambda: attend(sinks=freed(4), level=level),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"\b{name}: shape is .* it was freed"):
            call()
