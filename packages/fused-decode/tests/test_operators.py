"""The operators under PyTorch's machinery: schema, compilation, export, counts, direct calls, CUDA graphs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.fused_decode import linear_residual, norm_gated_linear, norm_linear, rotary_cache_attention
from kernel_pytorch.fused_decode.levels import LADDER

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    LADDER.unavailable("triton", torch.device("cpu"), torch.float32) is not None and not torch.cuda.is_available(),
    reason="no GPU, and Triton's interpreter is off",
)
operators = torch.ops.kernel_pytorch
NORM = ("rms", None, 0.0, 1e-6)
OPTIONS = (4, 0.25, None, None, None, None, 0.0, 1e-6, None, None)


def products(device, rows=3):
    x, weight, row, residual = (
        torch.randn(shape, device=device) for shape in ((rows, 32), (24, 32), (32,), (rows, 24))
    )
    return {
        "norm_linear": (x, weight, row, None, *NORM),
        "norm_gated_linear": (x, weight, row, torch.randn(24, device=device), "gelu", "layer", row, 1.0, 1e-5),
        "linear_residual": (x, weight, residual, None),
    }


def attention(device, rows=3, room=20, page=0):
    """Arguments of the operator without its options, and a table of pages or None."""
    count = room // page if page else 0
    shape = (rows * count + 1, 2, page, 16) if page else (rows, 2, room, 16)
    qkv, k, v = (torch.randn(s, device=device) for s in ((rows, 128), shape, shape))
    lengths = torch.tensor([7, -1, room - 1, 0, 3, 11][:rows], dtype=torch.int32, device=device)
    table = None
    if page:
        table = torch.randperm(shape[0], device=device)[: rows * count].view(rows, count).to(torch.int32)
    return (qkv, k, v, lengths, *torch.randn(2, room, 8, device=device)), table


@torch.no_grad()
@pytest.mark.parametrize("name", ["norm_linear", "norm_gated_linear", "linear_residual"])
def test_opcheck(name, device):
    for rows in (1, 3):
        torch.library.opcheck(getattr(operators, name).default, products(device, rows)[name])


@torch.no_grad()
@pytest.mark.parametrize("page", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_opcheck_of_what_writes(page, device):
    given, table = attention(device, page=page)
    torch.library.opcheck(operators.rotary_cache_attention.default, (*given, *OPTIONS[:-1], table))
    row, sinks = torch.ones(16, device=device), torch.randn(4, device=device)
    torch.library.opcheck(
        operators.rotary_cache_attention.default, (*given, 4, None, 5, 2.0, row, row, 1.0, 1e-6, sinks, table)
    )


def attend(*given, level="triton"):
    """What is computed, and both caches, of copies of them."""
    qkv, k, v, *rest = given
    k, v = k.clone(), v.clone()
    return rotary_cache_attention(qkv, k, v, *rest, num_heads=4, window=5, level=level), k, v


@torch.no_grad()
@pytest.mark.parametrize(
    "level", ["triton", *(pytest.param(level, marks=pytest.mark.slow) for level in ("native", "reference"))]
)
def test_another_number_of_rows_needs_no_other_graph(level, device):
    """The caches are written in a compiled caller too, which is captured whole."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()

    def step(x, weight, norm_weight, *given):
        return norm_linear(x, weight, norm_weight, level=level), *attend(*given, level=level)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for rows, room in ((3, 20), (5, 28), (6, 24)):
        x, weight, norm_weight, *_ = products(device, rows)["norm_linear"]
        given, _ = attention(device, rows, room)
        for ours, theirs in zip(
            compiled(x, weight, norm_weight, *given), step(x, weight, norm_weight, *given), strict=True
        ):
            torch.testing.assert_close(ours, theirs)
    assert len(graphs) == 1


@pytest.mark.parametrize("level", ["triton", "native"])
def test_rows_that_only_a_compiled_caller_has_are_refused_or_right(level, device):
    """Whether a symbolic number of rows is above 16 is known when the kernel is launched."""
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(lambda x, w, n: norm_linear(x, w, n, level=level), dynamic=True, backend="eager")
        x, weight, norm_weight, *_ = products(device)["norm_linear"]
        compiled(x, weight, norm_weight)
        many = torch.randn(20, 32, device=device)
        if level == "triton":
            with pytest.raises(ValueError, match="x: 20 rows; norm_linear takes at most 16"):
                compiled(many, weight, norm_weight)
        else:
            assert compiled(many, weight, norm_weight).shape == (20, 24)


@pytest.mark.parametrize("page", [0, 4])
def test_export_with_any_number_of_rows(page, device):
    class Step(torch.nn.Module):
        def forward(self, qkv, k, v, lengths, cos, sin, table):
            return rotary_cache_attention(
                qkv, k, v, lengths, cos, sin, num_heads=4, block_table=table, level="triton"
            ), k

    rows, pages = torch.export.Dim("rows", min=2, max=16), torch.export.Dim("pages", min=2)
    of_cache = {0: pages if page else rows}
    shapes = ({0: rows}, of_cache, of_cache, {0: rows}, None, None, {0: rows} if page else None)
    given, table = attention(device, page=page)
    with torch.no_grad():
        program = torch.export.export(Step(), (*given, table), dynamic_shapes=shapes)
        larger, table = attention(device, 6, page=page)
        copies = [(*(t.clone() for t in larger), table) for _ in range(2)]
        for ours, theirs in zip(program.module()(*copies[0]), Step()(*copies[1]), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert sum("rotary_cache_attention" in str(node.target) for node in program.graph.nodes) == 1


@torch.no_grad()
def test_flop_counter_sees_the_operators(device):
    given = products(device)
    with FlopCounterMode(display=False) as counter:
        for name, arguments in given.items():
            getattr(operators, name)(*arguments)
        caches, table = attention(device, page=4)
        operators.rotary_cache_attention(*caches, *OPTIONS[:-1], table)
    counts = counter.get_flop_counts()["Global"]
    for name in given:
        assert counts[getattr(operators, name)] == 2 * 3 * 32 * 24
    assert counts[operators.rotary_cache_attention] == 4 * 3 * 4 * 20 * 16


def test_the_operators_refuse_a_gradient(device):
    for name, (x, *others) in products(device).items():
        with pytest.raises(RuntimeError, match=f"{name} has no gradient"):
            getattr(operators, name)(x.requires_grad_(), *others)


def test_calling_an_operator_checks_what_would_read_foreign_memory(device):
    (x, w, row, *_), (qkv, k, v, lengths, cos, sin) = products(device)["norm_linear"], attention(device)[0]
    table = torch.zeros(3, 2, dtype=torch.int32, device=device)
    linear, gated, residual = operators.norm_linear, operators.norm_gated_linear, operators.linear_residual
    attend = operators.rotary_cache_attention
    bad = {
        r"x: dtype is torch\.float64": lambda: linear(x.double(), w.double(), row.double(), None, *NORM),
        r"x: 17 rows": lambda: linear(torch.ones(17, 32, device=device), w, row, None, *NORM),
        r"weight: shape is \(24, 16\)": lambda: linear(x, w[:, :16], row, None, *NORM),
        r"weight: dtype is torch\.float16": lambda: linear(x, w.half(), row, None, *NORM),
        r"norm_weight: shape is \(8,\)": lambda: linear(x, w, row[:8], None, *NORM),
        r"bias: shape is \(32,\)": lambda: linear(x, w, row, row, *NORM),
        "norm: given 'l2'": lambda: linear(x, w, row, None, "l2", *NORM[1:]),
        "weight: .* an even number": lambda: gated(x, w[:23], row, None, "silu", *NORM),
        "activation: given 'relu'": lambda: gated(x, w, row, None, "relu", *NORM),
        r"residual: shape is \(3, 32\)": lambda: residual(x, w, x, None),
        r"qkv: dtype is torch\.float64": lambda: attend(
            qkv.double(), k.double(), v.double(), lengths, cos, sin, *OPTIONS
        ),
        "v_cache: shape is": lambda: attend(qkv, k, v[:, :, :3], lengths, cos, sin, *OPTIONS),
        "k_cache: stride is": lambda: attend(qkv, *[t.transpose(2, 3).contiguous().transpose(2, 3) for t in (k, v)],
                                             lengths, cos, sin, *OPTIONS),
        "k_cache: .* the 3 rows of qkv": lambda: attend(qkv, k[:2], v[:2], lengths, cos, sin, *OPTIONS),
        r"lengths: shape is \(1,\)": lambda: attend(qkv, k, v, lengths[:1], cos, sin, *OPTIONS),
        r"lengths: given torch\.int64": lambda: attend(qkv, k, v, lengths.long(), cos, sin, *OPTIONS),
        r"cos: shape is \(20, 16\)": lambda: attend(qkv, k, v, lengths, cos.repeat(1, 2), sin, *OPTIONS),
        "num_heads: given 3": lambda: attend(qkv, k, v, lengths, cos, sin, 3, *OPTIONS[1:]),
        "window: given 21": lambda: attend(qkv, k, v, lengths, cos, sin, 4, None, 21, *OPTIONS[3:]),
        r"sinks: shape is \(32,\)": lambda: attend(qkv, k, v, lengths, cos, sin, *OPTIONS[:-2], row, None),
        r"block_table: shape is \(2, 2\)": lambda: attend(qkv, k, v, lengths, cos, sin, *OPTIONS[:-1], table[:2]),
        "head size is 258": lambda: attend(torch.ones(3, 8 * 258, device=device),
                                           *[torch.ones(3, 2, 4, 258, device=device) for _ in "kv"],
                                           lengths, cos, sin, *OPTIONS),
    }  # fmt: skip
    with torch.no_grad():
        for message, call in bad.items():
            with pytest.raises((TypeError, ValueError), match=message):
                call()


@torch.no_grad()
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_of_a_step_stays_right_while_lengths_change(device):
    given, _ = attention("cuda", room=1000)
    x, weight, row, *_ = products("cuda")["norm_linear"]
    residual = torch.randn(3, 24, device="cuda")

    def step(level):
        y = norm_linear(x, weight, row, level=level), norm_gated_linear(x, weight, row, level=level)
        return (*y, linear_residual(x, weight, residual, level=level), *attend(*given, level=level))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step("triton")
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step("triton")
    for lengths in ([0, 999, 30], [17, -1, 500]):
        given[3].copy_(torch.tensor(lengths))
        x.normal_()
        graph.replay()
        for ours, theirs in zip(found, step("reference"), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
