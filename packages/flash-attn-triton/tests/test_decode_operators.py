"""Decoding under PyTorch's machinery: schema, compilation with lengths that change, export, counts, direct calls."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.flash_attn_triton import flash_decode
from kernel_pytorch.flash_attn_triton.levels import LADDER
from kernel_pytorch.harness.checks import check_compiled_equals_eager, check_deterministic

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    LADDER.unavailable("triton", torch.device("cpu"), torch.float32) is not None and not torch.cuda.is_available(),
    reason="no GPU, and Triton's interpreter is off",
)
operators = torch.ops.kernel_pytorch
PLAIN = (None, None, 0.25, -1, 0, 0.0)  # alibi_slopes to softcap


def make(device, room=150, page=0, batch=2, queries=1):
    """Queries, caches, lengths and a table, or None."""
    q = torch.randn(batch, 4, queries, 16, device=device)
    count = -(-room // page) if page else 0
    shape = (batch * count + 1, 2, page, 16) if page else (batch, 2, room, 16)
    lengths = torch.tensor([room, 1, 0, 5, 33, room - 1, 7][:batch], dtype=torch.int32, device=device)
    table = None
    if page:
        table = torch.randperm(shape[0], device=device)[: batch * count].view(batch, count).to(torch.int32)
    return q, torch.randn(shape, device=device), torch.randn(shape, device=device), lengths, table


@pytest.mark.parametrize("page", [0, 16])
def test_opcheck(page, device):
    slopes, sinks = torch.rand(2, 4, device=device), torch.randn(4, device=device)
    torch.library.opcheck(operators.flash_decode.default, (*make(device, page=page), *PLAIN))
    torch.library.opcheck(
        operators.flash_decode.default, (*make(device, page=page, queries=3), slopes, sinks, 0.5, 20, -1, 2.0)
    )


@pytest.mark.parametrize(("page", "level"), [(0, "triton"), (32, "triton"), (32, "native"), (0, "reference")])
def test_another_length_needs_no_other_graph(level, page, device):
    """Neither what is in the tensors nor how much room there is; the caller is captured whole."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *given: flash_decode(*given, window=(40, 0), level=level), fullgraph=True, dynamic=True, backend=backend
    )
    for room, batch in ((224, 3), (150, 5), (300, 7)):  # sizes that are equal at first would be taken for one
        q, k, v, lengths, table = make(device, room, page, batch)
        for _ in range(2):
            expected = flash_decode(q, k, v, lengths, table, window=(40, 0), level=level)
            torch.testing.assert_close(compiled(q, k, v, lengths, table), expected)
            lengths = lengths // 2 + 1
    assert len(graphs) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic, device):
    check_compiled_equals_eager(
        lambda *given: flash_decode(*given, level="triton"), make(device, page=16), dynamic=dynamic, backward=False
    )


def test_bitwise_reproducible(device):
    check_deterministic(lambda *given: flash_decode(*given, level="triton"), make(device), backward=False)


@pytest.mark.parametrize("level", ["triton", "native", "reference"])
@pytest.mark.parametrize("page", [0, 16])
def test_export_with_any_batch_and_room(level, page, device):
    class Decode(torch.nn.Module):
        def forward(self, q, k, v, lengths, table):
            return flash_decode(q, k, v, lengths, table, level=level)

    batch, room = torch.export.Dim("batch", min=2), torch.export.Dim("room", min=2)
    pages = torch.export.Dim("pages", min=2)
    of_cache = {0: pages} if page else {0: batch, 2: room}
    shapes = ({0: batch}, of_cache, of_cache, {0: batch}, {0: batch, 1: room} if page else None)
    program = torch.export.export(Decode(), make(device, page=page), dynamic_shapes=shapes)
    larger = make(device, 320, page, batch=4)
    torch.testing.assert_close(program.module()(*larger), flash_decode(*larger, level=level))
    count = sum("kernel_pytorch" in str(node.target) for node in program.graph.nodes)
    assert count == (level == "triton")


def test_flop_counter_sees_the_operator(device):
    for page, room in ((0, 150), (16, 160)):
        with FlopCounterMode(display=False) as counter:
            flash_decode(*make(device, page=page, queries=3), level="triton")
        assert counter.get_flop_counts()["Global"][operators.flash_decode] == 4 * 2 * 4 * 3 * 16 * room


def test_the_operator_refuses_a_gradient(device):
    q, *others = make(device)
    with pytest.raises(RuntimeError, match="flash_decode has no gradient"):
        operators.flash_decode(q.requires_grad_(), *others, *PLAIN)


def test_calling_the_operator_checks_what_would_read_foreign_memory(device):
    q, k, v, lengths, _ = make(device)
    table = torch.zeros(2, 3, dtype=torch.int32, device=device)
    deep = [torch.ones(2, 1, 1, 257, device=device)] * 3
    bad = {
        r"v_cache: dtype is torch\.float64": (q, k, v.double(), lengths, None, *PLAIN),
        r"q: given torch\.float64 of shape": (q.double(), k.double(), v.double(), lengths, None, *PLAIN),
        r"q: given torch\.float32 of shape \(2, 1, 1, 257\); .* up to 256": (*deep, lengths, None, *PLAIN),
        "k_cache: head size is 8; it must": (q, k[..., :8], v, lengths, None, *PLAIN),
        "v_cache: shape is .* it must be that of k_cache": (q, k, v[:, :, :3], lengths, None, *PLAIN),
        "k_cache: batch size is 1; it must be that of q, 2": (q, k[:1], v[:1], lengths, None, *PLAIN),
        r"cache_seqlens: given torch\.int64": (q, k, v, lengths.long(), None, *PLAIN),
        r"cache_seqlens: shape is \(1,\)": (q, k, v, lengths[:1], None, *PLAIN),
        r"block_table: shape is \(3,\)": (q, k, v, lengths, table[0], *PLAIN),
        "k_cache: given 0 pages": (q, k[:0], v[:0], lengths, table, *PLAIN),
        r"alibi_slopes: shape is \(3,\)": (q, k, v, lengths, None, torch.ones(3, device=device), *PLAIN[1:]),
        r"sinks: shape is \(3,\)": (q, k, v, lengths, None, None, torch.ones(3, device=device), *PLAIN[2:]),
    }
    for message, arguments in bad.items():
        with pytest.raises((TypeError, ValueError), match=message):
            operators.flash_decode(*arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("page", [0, 16])
def test_a_cuda_graph_stays_right_while_lengths_change(page):
    call = make("cuda", 1000, page)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        flash_decode(*call, level="triton")
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            o = flash_decode(*call, level="triton")
    for lengths in ([0, 1000], [17, 999]):
        call[3].copy_(torch.tensor(lengths))
        graph.replay()
        torch.testing.assert_close(o, flash_decode(*call, level="reference"), rtol=1e-4, atol=1e-5)
