"""Flash attention of the library: shapes, gradients, bits, bad input. Verification is flash-attn-triton's."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.cuda_ops import LIBRARY, flash_attention
from kernel_pytorch.harness.checks import check_export

operators = torch.ops.kernel_pytorch_cuda

# Batch, heads, heads of keys, queries, keys, depth.
SHAPES = {
    "one tile": (1, 2, 2, 32, 64, 64),
    "grouped, ragged": (2, 6, 2, 33, 77, 40),
    "decoding": (3, 4, 1, 1, 200, 128),
    "more queries than keys": (1, 2, 1, 70, 9, 17),
    "many tiles": (1, 1, 1, 65, 300, 8),
    "one of each": (1, 1, 1, 1, 1, 1),
}


def definition(q, k, v, scale, causal):
    """Attention through the matrix of scores; a query that sees no key gives zeros."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    sees = sees.tril(k.shape[2] - q.shape[2]) if causal else sees
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~sees, -1e30)
    return torch.softmax(scores, -1) * sees @ v


def make(shape, dtype=torch.float32):
    batch, heads, kv_heads, queries, keys, depth = shape
    sizes = [(batch, heads, queries, depth), (batch, kv_heads, keys, depth), (batch, kv_heads, keys, depth)]
    return [torch.randn(size).to(dtype).requires_grad_() for size in sizes]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_against_float64(shape, causal):
    for dtype, bound in {torch.float64: 1e-13, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}.items():
        own = make(shape, dtype)
        wide = [t.detach().double().requires_grad_() for t in own]
        scale = shape[-1] ** -0.5
        truth = definition(*wide, scale, causal)
        found = flash_attention(*own, scale, causal)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), truth, rtol=bound, atol=bound)
        do = torch.randn_like(found)
        ours = torch.autograd.grad(found, own, do)
        theirs = torch.autograd.grad(truth, wide, do.double())
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=4 * bound, atol=4 * bound)


def test_a_query_that_sees_no_key_has_output_zero():
    q, k, v = make(SHAPES["more queries than keys"])
    o, lse = operators.flash_attention(q.detach(), k.detach(), v.detach(), 1.0, True)
    blind = 70 - 9
    assert torch.equal(o[:, :, :blind], torch.zeros_like(o[:, :, :blind]))
    assert (lse[:, :, :blind] == -float("inf")).all()
    assert lse[:, :, blind:].isfinite().all()
    gradients = torch.autograd.grad(flash_attention(q, k, v, 1.0, True).sum(), (q, k, v))
    assert all(g.isfinite().all() for g in gradients)
    nothing = torch.randn(1, 1, 0, 17)
    assert torch.equal(flash_attention(q, nothing, nothing), torch.zeros_like(q))


def test_lse_and_large_scores():
    q, k, v = (t.detach() for t in make(SHAPES["grouped, ragged"]))
    _, lse = operators.flash_attention(q * 100, k * 100, v, 1.0, False)
    scores = (q * 100).double() @ (k * 100).double().repeat_interleave(3, 1).transpose(-1, -2)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=0)


INSTRUCTION_SETS = """
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from kernel_pytorch.cuda_ops import flash_attention
    torch.manual_seed(0)
    for depth in (1, 8, 20, 64, 100):
        q, k, v = (torch.randn(2, 2, n, depth) for n in (37, 130, 130))
        sees = torch.ones(37, 130, dtype=torch.bool).tril(93)
        truth = scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=sees, scale=0.2)
        assert (flash_attention(q, k, v, 0.2, True) - truth).abs().max() < 5e-6, depth
        found = [flash_attention(q, k, v, 0.2, True)]
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(flash_attention(q, k, v, 0.2, True))
        assert all(torch.equal(found[0], other) for other in found)
"""


@pytest.mark.cpu_backend
@pytest.mark.parametrize("instruction_set", LIBRARY.instruction_sets)
def test_every_instruction_set_is_right_with_any_number_of_threads(instruction_set, run_on):
    run_on(instruction_set, INSTRUCTION_SETS)


def test_layouts():
    """Heads behind tokens, as projections give them."""
    q, k, v = (torch.randn(2, 9, 4, 16).transpose(1, 2) for _ in range(3))
    torch.testing.assert_close(flash_attention(q, k, v), definition(q, k, v, 0.25, False))


@pytest.mark.parametrize("causal", [False, True])
def test_second_derivatives(causal):
    tensors = make((1, 2, 1, 4, 3, 2), torch.float64)
    torch.autograd.gradcheck(lambda q, k, v: flash_attention(q, k, v, 0.7, causal), tensors)
    torch.autograd.gradgradcheck(lambda q, k, v: flash_attention(q, k, v, 0.7, causal), tensors)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
def test_opcheck():
    torch.library.opcheck(operators.flash_attention.default, (*make((1, 4, 2, 5, 7, 8)), 0.3, True))


def test_compiled():
    """In one graph; the backward is PyTorch's own, which TorchInductor may round otherwise."""
    tensors = make((2, 4, 2, 5, 7, 8))
    compiled = torch.compile(lambda q, k, v: flash_attention(q, k, v, causal=True), fullgraph=True)
    found, expected = (f(*tensors) for f in (compiled, lambda q, k, v: flash_attention(q, k, v, causal=True)))
    assert torch.equal(found, expected)
    do = torch.randn_like(found)
    for a, b in zip(torch.autograd.grad(found, tensors, do), torch.autograd.grad(expected, tensors, do), strict=True):
        torch.testing.assert_close(a, b)


def test_export():
    program = check_export(lambda q, k, v: flash_attention(q, k, v), [t.detach() for t in make((2, 4, 2, 5, 7, 8))])
    assert sum("kernel_pytorch_cuda" in str(node.target) for node in program.graph.nodes) == 1


def test_flop_counter():
    with FlopCounterMode(display=False) as counter:
        flash_attention(*(t.detach() for t in make((2, 4, 2, 5, 7, 8))))
    assert counter.get_flop_counts()["Global"] == {operators.flash_attention: 4 * 2 * 4 * 5 * 7 * 8}


@pytest.mark.cpu_backend
def test_bad_input_is_named():
    q, k, v = (t.detach() for t in make((1, 4, 2, 5, 7, 8)))
    for message, arguments in {
        r"q: shape is \(4, 5, 8\); it must be \(batch, heads, queries, depth\)": (q[0], k, v),
        r"k: shape is \(1, 2, 7, 4\); for q of shape": (q, k[..., :4], v),
        r"v: shape is \(1, 2, 6, 8\); it must be that of k": (q, k, v[:, :, :6]),
        "k: 3 heads do not divide the 4 heads of q": (q, torch.randn(1, 3, 7, 8), torch.randn(1, 3, 7, 8)),
        "v: dtype is torch.float64; it must be that of q, torch.float32": (q, k, v.double()),
        "q: dtype is torch.int32; allowed are float16": (q.int(), k, v),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            operators.flash_attention(*arguments, 0.3, False)
