"""The Triton operators: schema, gradients in every combination, bits, launches, compilation, counts, bad input."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.flash_attn_triton import flash_attention, flash_attention_masked, flash_attention_with_lse
from kernel_pytorch.flash_attn_triton.levels import LADDER
from kernel_pytorch.harness.checks import check_compiled_equals_eager, check_deterministic, check_export
from kernel_pytorch.harness.launches import count_launches

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    LADDER.unavailable("triton", torch.device("cpu"), torch.float32) is not None and not torch.cuda.is_available(),
    reason="no GPU, and Triton's interpreter is off",
)
operators = torch.ops.kernel_pytorch
PLAIN = (None, None, None, None, 0.25, -1, 0, 0.0, 0.0, None, None, 0, 0, False)  # bias to keep_rest, causal


def make(*shape, kv_heads=None, keys=None, device="cpu", dtype=torch.float32):
    batch, heads, queries, depth = shape
    of_keys = batch, kv_heads or heads, keys or queries, depth
    return [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for size in (shape, of_keys, of_keys)]


def opcheck_cases(device):
    q, k, v = make(1, 2, 3, 16, kv_heads=1, keys=4, device=device)
    bias, sinks = torch.randn(1, 2, 3, 4, device=device, requires_grad=True), torch.randn(2, device=device)
    slopes, seed = torch.rand(2, device=device), torch.tensor(7, device=device)
    starts = torch.tensor([0, 2, 3], device=device), torch.tensor([0, 1, 4], device=device)
    return {
        "plain": (q, k, v, *PLAIN),
        "all": (q, k, v, bias, slopes, sinks.requires_grad_(), seed, 0.25, 4, 0, 2.0, 0.1, None, None, 0, 0, True),
        "packed": (q, k, v, *PLAIN[:-5], *starts, 2, 3, False),
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
@pytest.mark.parametrize("name", ["all", *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "packed"))])
def test_opcheck(name, device):
    torch.library.opcheck(operators.flash_attention.default, opcheck_cases(device)[name])


@pytest.mark.parametrize("needs", [n for n in itertools.product([False, True], repeat=5) if sum(n) in (1, 4, 5)])
def test_gradients_in_every_combination(needs, device):
    tensors = *make(1, 2, 9, 16, device=device), torch.randn(1, 1, 9, 9, device=device), torch.randn(2, device=device)
    found = []
    for level in ("triton", "reference"):
        q, k, v, bias, sinks = own = [
            t.detach().clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)
        ]
        o = flash_attention_masked(q, k, v, bias, sinks=sinks, causal=True, level=level)
        found.append(torch.autograd.grad(o.square().sum(), [t for t in own if t.requires_grad]))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_only_what_is_needed_is_launched(device):
    q, k, v = make(1, 2, 40, 16, device=device)
    with count_launches() as launched:
        o = flash_attention(q, k.detach(), v.detach(), level="triton")
        torch.autograd.grad(o.sum(), q)
    assert launched == ["_forward_kernel", "_delta_kernel", "dq_kernel"]
    with count_launches() as launched:
        o = flash_attention(q.detach(), k, v, level="triton")
        torch.autograd.grad(o.sum(), (k, v))
    assert launched == ["_forward_kernel", "_delta_kernel", "dkdv_kernel"]


def test_lse_alone_may_be_used(device):
    tensors = make(1, 2, 9, 16, device=device)
    found = [
        torch.autograd.grad(flash_attention_with_lse(*tensors, level=level)[1].square().sum(), tensors[:2])
        for level in ("triton", "reference")
    ]
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_bitwise_reproducible(device):
    check_deterministic(
        lambda q, k, v: flash_attention(q, k, v, causal=True, deterministic=True, level="triton"),
        make(1, 4, 70, 16, kv_heads=2, device=device),
    )


@pytest.mark.parametrize(("dtype", "rest"), [(torch.float32, []), (torch.float16, [2 * 90 * 16])])
def test_saved_for_the_backward(dtype, rest, device):
    """q, k, v, the output and what rounding took off it, maxima, sums: nothing grows with the square of a length."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        flash_attention(*make(1, 2, 90, 16, device=device, dtype=dtype), level="triton")
    assert sorted(saved) == sorted([2 * 90 * 16] * 4 + [2 * 90 * 2, *rest])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic, device):
    tensors = make(1, 4, 20, 16, kv_heads=2, device=device)
    check_compiled_equals_eager(
        lambda q, k, v: flash_attention(q, k, v, causal=True, level="triton"), tensors, dynamic=dynamic
    )


@pytest.mark.parametrize("level", ["triton", "native", "reference"])
def test_another_length_needs_no_other_graph(level, device):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: flash_attention(q, k, v, causal=True, level=level),
        fullgraph=True,
        dynamic=True,
        backend=backend,
    )
    for length in (9, 20, 33, 50):
        tensors = make(1, 2, length, 16, device=device)
        torch.testing.assert_close(compiled(*tensors), flash_attention(*tensors, causal=True, level=level))
    assert len(graphs) == 1


def test_export(device):
    program = check_export(
        lambda q, k, v: flash_attention(q, k, v, level="triton"), [t.detach() for t in make(2, 2, 5, 16, device=device)]
    )
    assert sum("kernel_pytorch" in str(node.target) for node in program.graph.nodes) == 1


def test_flop_counter_sees_the_operators(device):
    q, k, v = make(2, 4, 5, 16, kv_heads=2, keys=7, device=device)
    with FlopCounterMode(display=False) as counter:
        flash_attention(q, k, v, level="triton").sum().backward()
    product = 2 * 4 * 5 * 7 * 16
    counts = counter.get_flop_counts()["Global"]
    assert counts[operators.flash_attention] == 4 * product
    assert counts[operators.flash_attention_backward] == 10 * product


def test_second_derivatives_are_refused(device):
    q, k, v = make(1, 2, 5, 16, device=device)
    loss = flash_attention(q, k, v, level="triton").square().sum()
    with pytest.raises(RuntimeError, match="flash_attention_backward has no gradient"):
        torch.autograd.grad(loss, q, create_graph=True)


def test_calling_the_operator_checks_what_would_read_foreign_memory(device):
    q, k, v = (t.detach() for t in make(1, 4, 5, 16, kv_heads=2, keys=7, device=device))
    bad = {
        r"v: dtype is torch\.float64": (q, k, v.double(), *PLAIN),
        r"q: given torch\.float64": (q.double(), k.double(), v.double(), *PLAIN),
        r"v: shape is \(1, 2, 3, 16\); it must be that of k": (q, k, v[:, :, :3], *PLAIN),
        r"k: head size is 8; it must be that of q, 16": (q, k[..., :8], v, *PLAIN),
        r"k: 3 heads; their number must divide that of q, 4": (
            q,
            *[t[:, :1].expand(1, 3, 7, 16) for t in (k, v)],
            *PLAIN,
        ),
        r"bias: shape is \(1, 4, 5, 9\)": (q, k, v, torch.randn(1, 4, 5, 9, device=device), *PLAIN[1:]),
        r"sinks: shape is \(3,\)": (q, k, v, None, None, torch.randn(3, device=device), *PLAIN[3:]),
        r"alibi_slopes: shape is \(3,\)": (q, k, v, None, torch.randn(3, device=device), *PLAIN[2:]),
        "seed: given None; with dropout_p 0.5": (q, k, v, *PLAIN[:8], 0.5, *PLAIN[9:]),
        "cu_seqlens_k: it must be given exactly where": (q, k, v, *PLAIN[:9], torch.tensor([0, 5]), None, 5, 0, False),
    }
    for message, arguments in bad.items():
        with pytest.raises((TypeError, ValueError), match=message):
            operators.flash_attention(*arguments)


PLACES = {"do": 0, "dlse": 1, "bias": 5, "alibi_slopes": 6, "sinks": 7, "seed": 8, "o": 9, "normalizer": 10, "rest": 11,
          "cu_seqlens_q": 17, "cu_seqlens_k": 18}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_the_backward_reads_no_memory_that_was_freed(name, device):
    q, k, v = (t.detach() for t in make(1, 2, 9, 16, device=device))
    o, _, normalizer, _ = torch.ops.kernel_pytorch.flash_attention(
        q, k, v, None, None, None, None, 0.25, -1, -1, 0.0, 0.0, None, None, 0, 0, True
    )
    arguments = [q.clone(), None, q, k, v, None, None, None, None, o, normalizer, None, 0.25, -1, -1, 0.0, 0.0, None,
                 None, 0, 0, True, True, True, False, False]  # fmt: skip
    given = arguments[PLACES[name]]
    freed = torch.zeros(3, device=device) if given is None else given.clone()
    freed.untyped_storage().resize_(0)
    arguments[PLACES[name]] = freed
    with pytest.raises(ValueError, match=f"{name}: shape is .* it was freed"):
        torch.ops.kernel_pytorch.flash_attention_backward(*arguments)


@pytest.mark.parametrize("longest", [4, 0])
def test_tokens_of_no_sequence_are_no_memory_that_nobody_wrote(longest, device, monkeypatch):
    """What is allocated holds numbers of others; a call may say that its sequences are shorter than they are."""
    original = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: _filled(original(*size, **options)))
    q, k, v = (t.detach() for t in make(1, 2, 10, 16, device=device))
    starts = torch.tensor([2, 6], dtype=torch.int32, device=device)
    o, lse, normalizer, _ = operators.flash_attention(q, k, v, *PLAIN[:-5], starts, starts, longest, 4, True)
    apart = [0, 1, *range(6, 10)]
    assert not o[..., apart, :].any()
    assert not normalizer[..., apart, :].any()
    assert (lse[..., apart] == float("-inf")).all()
    options = starts, starts, longest, 4, True, True, True, False, False
    found = operators.flash_attention_backward(
        q, None, q, k, v, None, None, None, None, o, torch.zeros_like(lse), None, *PLAIN[4:9], *options
    )
    assert max(gradient.abs().max().item() for gradient in found[:3]) < 1e3


def _filled(made):
    return made.fill_(1e6) if made.is_floating_point() and made.device.type != "meta" else made


@pytest.mark.parametrize("wrong", [[0, 50, 99], [-7, 5, 9], [0, 7, 3], [2**40, 2**41, 3]])
def test_wrong_starts_of_sequences_read_no_foreign_memory(wrong, device):
    """They are taken for the nearest that exist; public functions refuse them where they may read the numbers."""
    q, k, v = (t.detach() for t in make(1, 2, 9, 16, device=device))
    nearest, last = [], 0
    for start, end in itertools.pairwise(wrong):
        start = min(max(start, 0), 9)
        last = min(max(end, start), 9)
        nearest.append((start, last))
    given = torch.tensor(wrong, device=device)
    o, _, normalizer, _ = torch.ops.kernel_pytorch.flash_attention(
        q, k, v, None, None, None, None, 0.25, -1, -1, 0.0, 0.0, given, given, 9, 9, True
    )
    do = torch.ones_like(o)
    gradients = torch.ops.kernel_pytorch.flash_attention_backward(
        do, None, q, k, v, None, None, None, None, o, normalizer, None, 0.25, -1, -1, 0.0, 0.0, given, given, 9, 9,
        True, True, True, False, False,
    )  # fmt: skip
    for found in (o, *gradients[:3]):
        assert found.isfinite().all()
    start, end = nearest[-1]
    inside = [t[:, :, start:end] for t in (q, k, v)]
    if end > start:
        torch.testing.assert_close(o[:, :, start:end], flash_attention(*inside, scale=0.25, level="reference"))
