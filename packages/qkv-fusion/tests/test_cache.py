"""`qkv_norm_rope_cache_`: every level against a loop in float64, places that do not exist, operators, bad input."""

import json
import os
import subprocess
import sys

import pytest
import torch

from kernel_pytorch.harness.launches import count_launches
from kernel_pytorch.qkv_fusion import qkv_norm_rope, qkv_norm_rope_cache_
from kernel_pytorch.qkv_fusion._core import cuda_level
from kernel_pytorch.qkv_fusion.levels import LADDER

operators = torch.ops.kernel_pytorch
LEVELS = ["reference", "native", "triton", *(["cuda"] if cuda_level.cuda_ops is not None else [])]
X, K_CACHE, V_CACHE, LENGTHS, PAGES = 0, 7, 8, 9, 10  # among the arguments
D, C, NOTHING = 10, 12, -7.0  # what a cache holds before


@pytest.fixture(params=LEVELS)
def level(request, device):
    reason = LADDER.unavailable(request.param, torch.device(device), torch.float32)
    if reason is not None:
        pytest.skip(reason)
    return request.param


def arguments(device, batch=2, tokens=3, heads=4, kv_heads=2, dtype=torch.float32, rotated=6):
    """Give x, weight, bias, the weights of the norm, cos and sin of each sequence, and numbers of heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, tokens, C), ((heads + 2 * kv_heads) * D, C), ((heads + 2 * kv_heads) * D,), (D,), (D,)
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    angles = torch.rand(batch, tokens, rotated // 2, generator=generator) * 6.28
    return [*tensors, angles.cos().to(device), angles.sin().to(device)], {"num_heads": heads}


def contiguous(*shape, device, dtype=torch.float32):
    return torch.full(shape, NOTHING, device=device, dtype=dtype)


def tokens_first(pages, heads, room, columns, **made):
    """As vLLM has pages."""
    return contiguous(pages, room, heads, columns, **made).transpose(1, 2)


def half_of_both(pages, heads, room, columns, **made):
    """Every other page of a larger tensor, whose columns do not begin at a multiple of 16 bytes."""
    return contiguous(2 * pages, heads, room, columns + 3, **made)[::2, :, :, 3:]


def truth(given, keywords, caches, lengths, table):
    """A loop over tokens in float64; gives q and the caches."""
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in given]
    heads = {**keywords, "num_kv_heads": caches[0].shape[1]}
    q, k, v = qkv_norm_rope(*wide, **heads, level="reference")
    expected = [cache.double() for cache in caches]
    pages, _, size, _ = caches[0].shape
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            position = int(lengths[b]) + i
            page = b
            if table is not None:
                page = int(table[b, position // size]) if 0 <= position < size * table.shape[1] else -1
                position %= size
            if 0 <= page < pages and 0 <= position < size:
                expected[0][page, :, position], expected[1][page, :, position] = k[b, i], v[b, i]
    return q, *expected


LAYOUTS = [contiguous, tokens_first, half_of_both]
TABLE = [[5, 0, 2], [3, 6, 1]]
CASES = {
    "contiguous": ({}, [0, 4], None, 9),
    "full at the end": ({}, [6, 0], None, 9),
    "behind the end": ({}, [7, 9], None, 9),
    "before the beginning": ({}, [-2, -3], None, 9),
    "far outside": ({}, [2**31 - 1, -(2**31)], None, 9),
    "one token": ({"tokens": 1}, [8, 3], None, 9),
    "more new tokens than room": ({"tokens": 9}, [-3, 1], None, 4),
    "pages": ({}, [1, 7], TABLE, 4),
    "pages of one token": ({}, [0, 0], TABLE, 1),
    "over the edge of pages": ({"tokens": 6}, [2, 3], TABLE, 4),
    "behind the last page": ({}, [11, 12], TABLE, 4),
    "pages that do not exist": ({"tokens": 8}, [0, 2], [[7, -1, 2], [-(2**31), 0, 2**31 - 1]], 4),
    "all pages unknown": ({}, [0, 0], [[7], [-1]], 4),
    "multi-head": ({"heads": 3, "kv_heads": 3}, [0, 4], None, 9),
    "one head of keys": ({"heads": 5, "kv_heads": 1}, [1, 7], TABLE, 4),
    "all columns are rotated": ({"rotated": 10}, [1, 7], TABLE, 4),
    "no tokens": ({"tokens": 0}, [0, 0], None, 4),
    "no sequences": ({"batch": 0}, [], None, 4),
    "no room": ({}, [0, 0], None, 0),
    "no pages": ({}, [0, 0], [[], []], 4),
}


@pytest.mark.parametrize("layout", range(3))
@pytest.mark.parametrize("name", CASES)
def test_against_a_loop(name, layout, level, device):
    sizes, lengths, table, room = CASES[name]
    given, keywords = arguments(device, **sizes)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device).repeat_interleave(2)[::2]  # strides of their own
    if table is not None:
        table = torch.tensor(table, dtype=torch.int32, device=device).reshape(2, -1).t().contiguous().t()
    pages = given[0].shape[0] if table is None else 7
    shape = pages, sizes.get("kv_heads", 2), room, D
    caches = [LAYOUTS[(layout + i) % 3](*shape, device=device) for i in range(2)]
    options = {**keywords, "offset": 0.5, "interleaved": room == 4}
    expected = truth(given, options, caches, lengths, table)
    q = qkv_norm_rope_cache_(*given, *caches, lengths, table, **options, level=level)
    assert q.shape == expected[0].shape
    for found, wanted in zip((q, *caches), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    for cache, wanted in zip(caches, expected[1:], strict=True):
        assert torch.equal(cache == NOTHING, wanted == NOTHING)  # nothing else is written


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes(dtype, level, device):
    given, keywords = arguments(device, dtype=dtype)
    caches = [contiguous(2, 2, 9, D, device=device, dtype=dtype) for _ in range(2)]
    lengths = torch.tensor([1, 5], dtype=torch.int32, device=device)
    expected = truth(given, keywords, caches, lengths, None)
    found = qkv_norm_rope_cache_(*given, *caches, lengths, **keywords, level=level), *caches
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, wanted.to(dtype), rtol=4e-3 if dtype == torch.float16 else 1e-10, atol=4e-3)


def test_positions_are_those_of_the_tables(level, device):
    given, keywords = arguments(device)
    tables = [t.flatten(0, 1) for t in given[5:]]
    ids = torch.tensor([[5, 0, 1], [3, 3, 2]], device=device)
    lengths = torch.tensor([0, 2], dtype=torch.int32, device=device)
    caches = [[contiguous(2, 2, 9, D, device=device) for _ in range(2)] for _ in range(2)]
    q = qkv_norm_rope_cache_(
        *given[:5], *tables, *caches[0], lengths, **keywords, position_ids=ids, level=level
    )  # fmt: skip
    by_token = [t[ids] for t in tables]
    expected = qkv_norm_rope_cache_(*given[:5], *by_token, *caches[1], lengths, **keywords, level="reference")
    torch.testing.assert_close((q, *caches[0]), (expected, *caches[1]))


@pytest.mark.parametrize("page", [0, 4])
def test_decoding_is_attention_to_all_tokens(page, level, device):
    """A prompt at once and then token by token, with `flash_decode`."""
    decode = pytest.importorskip("kernel_pytorch.flash_attn_triton").flash_decode
    given, keywords = arguments(device, tokens=9)
    x, parameters, tables = given[0], given[1:5], given[5:]
    table = torch.tensor(TABLE, dtype=torch.int32, device=device) if page else None
    shape = (7, 2, page, D) if page else (2, 2, 12, D)
    caches = [torch.full(shape, float("nan"), device=device) for _ in range(2)]
    lengths, outputs = torch.zeros(2, dtype=torch.int32, device=device), []
    for part in (slice(0, 5), *(slice(i, i + 1) for i in range(5, 9))):
        new = x[:, part], *parameters, *(t[:, part] for t in tables)
        q = qkv_norm_rope_cache_(*new, *caches, lengths, table, **keywords, level=level)
        lengths = lengths + q.shape[1]
        outputs.append(decode(q.transpose(1, 2), *caches, lengths, table, level="reference"))
    q, k, v = (t.transpose(1, 2) for t in qkv_norm_rope(*given, **keywords, num_kv_heads=2, level="reference"))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(torch.cat(outputs, 2), expected)


def ready(device, page=0):
    """Arguments of the public function, with caches."""
    given, keywords = arguments(device)
    caches = [contiguous(7 if page else 2, 2, page or 9, D, device=device) for _ in range(2)]
    table = torch.tensor(TABLE, dtype=torch.int32, device=device) if page else None
    return [*given, *caches, torch.tensor([1, 5], dtype=torch.int32, device=device), table], keywords


def heads_of(given):
    """Arguments of the operator."""
    x, weight, _, q_weight, k_weight, *rest = given
    q, k, v = (x @ weight.T).unflatten(-1, (8, D)).split((4, 2, 2), -2)
    return [q, k, v, q_weight, k_weight, *rest, 1e-6, False, 0.5]


def test_offsets_beyond_32_bits(device):
    """Heads that are 2^30 elements apart, of which memory is touched where tokens are written."""
    given, keywords = arguments(device, heads=3, kv_heads=3, dtype=torch.float16)
    apart = 2**30 + 8
    memory = torch.empty(2 * apart + 2**20, dtype=torch.float16, device=device)
    far = [memory[start:].as_strided((2, 3, 9, D), (9 * D, apart, D, 1)) for start in (0, 2**10)]
    near = [contiguous(2, 3, 9, D, device=device, dtype=torch.float16) for _ in range(2)]
    lengths = torch.tensor([0, 6], dtype=torch.int32, device=device)
    for caches in (far, near):
        caches[0].fill_(NOTHING), caches[1].fill_(NOTHING)
        qkv_norm_rope_cache_(*given, *caches, lengths, **keywords, level="triton")
    assert all(torch.equal(a, b) for a, b in zip(far, near, strict=True))


COMPILE = """
import dataclasses, json, sys, torch
from kernel_pytorch.harness.static import triton_code
from kernel_pytorch.harness.static.gate import violations
from kernel_pytorch.harness.static.launches import record_launches, use_architecture
from kernel_pytorch.harness.technique import Exemption
from kernel_pytorch.qkv_fusion import qkv_norm_rope_cache_
from kernel_pytorch.qkv_fusion.levels import LADDER
from kernel_pytorch.qkv_fusion.technique import technique
use_architecture(int(sys.argv[1]))
LADDER.unavailable = lambda *arguments: None
operation = technique.operation("qkv_norm_rope")
operation = dataclasses.replace(operation, exemptions=[Exemption(("gradients",), "it writes a cache")])
case = operation.bench_grid.cases("cuda")[0]
int32 = {"dtype": torch.int32}
launches = []
for shape, table in (((2, 8, 32, 128), None), ((9, 8, 16, 128), torch.empty(2, 4, **int32))):
    made = [torch.empty(s, dtype=torch.bfloat16) for s in ((2, 1, 64), (4096, 64), (128,), (128,), shape, shape)]
    x, weight, *norms, k_cache, v_cache = made
    cos, sin = torch.empty(2, 2, 1, 64).unbind(0)
    given = x, weight, None, *norms, cos, sin, k_cache, v_cache, torch.empty(2, **int32), table
    write = lambda *_: qkv_norm_rope_cache_(*given, num_heads=16, level="triton")
    launches += record_launches(operation, "triton", write, case, bench=True)
found = [triton_code._read(launch, f"sm_{sys.argv[1]}") for launch in launches]
broken = violations(technique, found, complete=False)
json.dump([[c.model_dump(mode="json") for c in found], [str(v) for v in broken]], sys.stdout)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Triton's compiler")
@pytest.mark.parametrize("architecture", [90, *(pytest.param(n, marks=pytest.mark.slow) for n in (80, 100, 120))])
def test_the_kernel_compiles_to_whole_vectors(architecture):
    """The interpreter accepts what the compiler refuses, and no operation of the harness launches this kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(  # another process: in this one Triton may interpret
        [sys.executable, "-c", COMPILE, str(architecture)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found, broken = json.loads(ran.stdout)
    assert broken == []
    assert len(found) == 2
    for kernel in found:
        assert set(kernel["stores"]["accesses"]) == {"128"}


@pytest.mark.parametrize("page", [0, 4])
def test_opcheck(page, device):
    torch.library.opcheck(operators.norm_rope_cache_.default, heads_of(ready(device, page)[0]))


def test_one_launch_and_versions(device):
    given, keywords = ready(device, 4)
    versions = [cache._version for cache in given[7:9]]
    with count_launches() as launches:
        qkv_norm_rope_cache_(*given, **keywords, level="triton")
    assert launches == ["_norm_rope_cache_kernel"]
    assert all(cache._version > version for cache, version in zip(given[7:9], versions, strict=True))
    with torch.inference_mode():
        given, keywords = ready(device, 4)
        qkv_norm_rope_cache_(*given, **keywords, level="triton")


@pytest.mark.parametrize("page", [0, 4])
def test_other_lengths_need_no_other_graph(page, level, device):
    given, keywords = ready(device, page)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(qkv_norm_rope_cache_, fullgraph=True, backend=backend)
    for start in ([0, 1], [6, 2], [20, -1]):
        given[9] = torch.tensor(start, dtype=torch.int32, device=device)
        expected = [t.clone() for t in given[7:9]]
        q = qkv_norm_rope_cache_(*given[:7], *expected, *given[9:], **keywords, level=level)
        torch.testing.assert_close(compiled(*given, **keywords, level=level), q)
        torch.testing.assert_close(given[7:9], expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("page", [0, 4])
def test_export_with_any_batch(page, level, device):
    given, keywords = ready(device, page)
    batch = torch.export.Dim("batch", min=2)
    places = {0, 5, 6, LENGTHS, *([PAGES] if page else [K_CACHE, V_CACHE])}
    shapes = tuple({0: batch} if place in places else None for place in range(len(given)))

    class Cached(torch.nn.Module):
        def forward(self, *given):
            return qkv_norm_rope_cache_(*given, **keywords, level=level)

    program = torch.export.export(Cached(), tuple(given), dynamic_shapes=(shapes,))
    assert sum("norm_rope_cache_" in str(node.target) for node in program.graph.nodes) == (level == "triton")
    larger = [torch.cat((t, t[:1])) if place in places else t for place, t in enumerate(given)]
    expected = [t.clone() for t in larger[7:9]]
    q = qkv_norm_rope_cache_(*larger[:7], *expected, *larger[9:], **keywords, level=level)
    torch.testing.assert_close((program.module()(*larger), *larger[7:9]), (q, *expected))


def test_autocast(level, device):
    given, keywords = ready(device)
    with torch.autocast(torch.device(device).type, torch.float16):
        with pytest.raises(TypeError, match=r"k_cache: dtype is torch\.float32; it must be .*, torch\.float16"):
            qkv_norm_rope_cache_(*given, **keywords, level=level)
        given[7:9] = [cache.half() for cache in given[7:9]]
        assert qkv_norm_rope_cache_(*given, **keywords, level=level).dtype == torch.float16
    assert (given[8][0, :, 1:4] != NOTHING).all()


BAD = [
    (X, lambda x: x[0], ValueError, r"x: shape is \(3, 12\); it must be \(B, S, C\)"),
    (K_CACHE, lambda c: c[:1], ValueError, r"k_cache: shape is \(1, 2, 9, 10\); it must be \(B, K, N, D\) with B = 2"),
    (K_CACHE, lambda c: c[..., 1:], ValueError, r"k_cache: shape is \(2, 2, 9, 9\)"),
    (K_CACHE, lambda c: c[:, :1], ValueError, r"v_cache: shape is \(2, 2, 9, 10\); it must be that of k_cache"),
    (K_CACHE, lambda c: c.half(), TypeError, r"k_cache: dtype is torch\.float16; it must be that of keys and values"),
    (V_CACHE, lambda c: c.double(), TypeError, r"v_cache: dtype is torch\.float64; it must be that of keys and values"),
    (LENGTHS, lambda n: n.long(), TypeError, r"cache_seqlens: given torch\.int64; it must be a tensor of torch\.int32"),
    (LENGTHS, lambda n: n[:1], ValueError, r"cache_seqlens: shape is \(1,\); it must be \(B,\) with B = 2"),
    (PAGES, lambda n: [[0], [1]], TypeError, r"block_table: given list; it must be a tensor of torch\.int32"),
]


@pytest.mark.parametrize(("place", "change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_written(place, change, error, message, level, device):
    given, keywords = ready(device)
    caches = given[7:9]
    given[place] = change(given[place])
    with pytest.raises(error, match=message):
        qkv_norm_rope_cache_(*given, **keywords, level=level)
    assert all((cache == NOTHING).all() for cache in caches)


@pytest.mark.parametrize("wrong", [3, -1])
def test_positions_outside_of_the_tables_are_named_on_a_cpu_and_nothing_is_written(wrong, level, device):
    if torch.device(device).type != "cpu":
        pytest.skip("values are read on a CPU alone")
    given, keywords = ready(device)
    given[5:7] = [table[0] for table in given[5:7]]
    with pytest.raises(ValueError, match=rf"^position_ids: given {wrong}; the tables have rows 0 to 2$"):
        qkv_norm_rope_cache_(*given, **keywords, position_ids=torch.tensor([0, wrong, 1]), level=level)
    assert all((cache == NOTHING).all() for cache in given[7:9])


def test_what_cannot_be_done_is_refused(device):
    given, keywords = ready(device, 4)
    with pytest.raises(ValueError, match=r"k_cache: shape is .*; page_size must be at least 1"):
        qkv_norm_rope_cache_(*given[:7], *(cache[:, :, :0] for cache in given[7:9]), *given[9:], **keywords)
    with pytest.raises(ValueError, match=r"v_cache: it is k_cache; it must be another tensor"):
        qkv_norm_rope_cache_(*given[:8], given[7], *given[9:], **keywords)
    given[10] = given[10][0]
    with pytest.raises(ValueError, match=r"block_table: shape is \(3,\); it must be \(B, max_blocks\) with B = 2"):
        qkv_norm_rope_cache_(*given, **keywords)
    given, keywords = ready(device)
    with pytest.raises(ValueError, match=r"weight: shape is .*; it must be \(90, 12\): \(num_heads \+ 2 \* K of"):
        qkv_norm_rope_cache_(*given, num_heads=5)
    given[1].requires_grad_()
    with pytest.raises(RuntimeError, match=r"has no gradient: call it under torch\.no_grad\(\), or qkv_norm_rope"):
        qkv_norm_rope_cache_(*given, **keywords)
    given[1].requires_grad_(False)
    given[8] = torch.zeros(2, 2, 9, 2 * D, device=device)[..., ::2]
    with pytest.raises(ValueError, match=r"v_cache: strides are \(360, 180, 20, 2\); columns must be adjacent"):
        qkv_norm_rope_cache_(*given, **keywords, level="triton")


def test_calling_the_operator_checks_what_would_write_foreign_memory(device):
    given = heads_of(ready(device, 4)[0])

    def call(place, value):
        return operators.norm_rope_cache_(*given[:place], value, *given[place + 1 :])

    for place, value, message in (
        (1, given[1][:, :, :1], r"v: shape is"),
        (2, given[2][:1], r"v: shape is"),
        (8, given[8][:3], r"v_cache: shape is"),
        (9, given[9][:1], r"cache_seqlens: shape is"),
        (10, given[10][:1], r"block_table: shape is"),
    ):
        with pytest.raises(ValueError, match=message):
            call(place, value)
    with pytest.raises(ValueError, match=r"k_cache: .* it must have 1 heads"):
        operators.norm_rope_cache_(given[0], *(t[:, :, :1] for t in given[1:3]), *given[3:])
    with pytest.raises(TypeError, match="v: dtype is"):
        call(2, given[2].half())
