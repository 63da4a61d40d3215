"""`rotary_embedding` beyond what verification asks: conventions, layouts, bits, autograd, bad input."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.cuda_ops import LIBRARY, levels, rotary_embedding
from kernel_pytorch.cuda_ops.rungs import rung
from kernel_pytorch.harness.checks import (
    check_compiled_equals_eager,
    check_deterministic,
    check_export,
    check_gradient_combinations,
    check_rows_independent,
    check_second_derivatives,
)

operator = torch.ops.kernel_pytorch_cuda.rotary_embedding
CPU = torch.device("cpu")


def definition(x, cos, sin, interleaved=False):
    wide = torch.promote_types(x.dtype, torch.float32)
    h, (c, s), rotated = x.to(wide), (t.detach().to(wide).unsqueeze(-2) for t in (cos, sin)), 2 * cos.shape[-1]
    if interleaved:
        first, second = h[..., 0:rotated:2], h[..., 1:rotated:2]
        y = torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)
    else:
        first, second = h[..., :rotated].chunk(2, -1)
        y = torch.cat((first * c - second * s, second * c + first * s), -1)
    return torch.cat((y, h[..., rotated:]), -1).to(x.dtype)


def tables(tokens, rotated, dtype=torch.float32, batch=()):
    angles = torch.rand(*batch, tokens, rotated // 2, generator=torch.Generator().manual_seed(1)) * 6.28
    return angles.cos().to(dtype), angles.sin().to(dtype)


def make(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_(grad)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def test_is_what_transformers_calls_apply_rotary_pos_emb():
    """q `(B, H, S, D)`, cos and sin `(B, S, D)` with every number twice, as in modeling_llama.py."""
    q = make(2, 4, 7, 32, grad=False)
    half_cos, half_sin = tables(7, 32, batch=(2,))
    cos, sin = torch.cat((half_cos, half_cos), -1), torch.cat((half_sin, half_sin), -1)
    theirs = q * cos.unsqueeze(1) + rotate_half(q) * sin.unsqueeze(1)
    ours = rotary_embedding(q.transpose(1, 2), cos[..., :16], sin[..., :16]).transpose(1, 2)
    torch.testing.assert_close(ours, theirs)


def test_is_what_gpt_j_calls_apply_rotary_pos_emb():
    """x `(B, S, H, D)`, sin and cos `(1, S, 1, R)` with every number twice in a row, as in modeling_gptj.py."""
    x, (cos, sin) = make(2, 7, 4, 32, grad=False), tables(7, 16)
    rotated, rest = x[..., :16], x[..., 16:]
    c, s = (t.repeat_interleave(2, -1).view(1, 7, 1, 16) for t in (cos, sin))
    every_two = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), -1).flatten(-2)
    theirs = torch.cat((rotated * c + every_two * s, rest), -1)
    torch.testing.assert_close(rotary_embedding(x, cos, sin, True), theirs)


def test_is_a_product_of_complex_numbers():
    x, (cos, sin) = make(5, 2, 8, dtype=torch.float64, grad=False), tables(5, 8, torch.float64)
    numbers = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin).unsqueeze(1)
    torch.testing.assert_close(rotary_embedding(x, cos, sin, True), torch.view_as_real(numbers).flatten(-2))


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_of_queries_and_keys_go_by_distance_alone(interleaved):
    q, k = make(1, 1, 16, dtype=torch.float64, grad=False), make(1, 1, 16, dtype=torch.float64, grad=False).flip(-1)

    def product(at, other):
        frequencies = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
        turned = [
            rotary_embedding(x, (p * frequencies).cos()[None], (p * frequencies).sin()[None], interleaved)
            for x, p in ((q, at), (k, other))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(3, 11), product(103, 111))


AGAINST_FLOAT64 = """
    import torch
    from kernel_pytorch.cuda_ops import rotary_embedding
    torch.manual_seed(0)
    bounds = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6, torch.float64: 4e-15}
    for dtype, bound in bounds.items():
        for columns, rotated in ((2, 2), (7, 6), (64, 64), (70, 70), (80, 32), (1030, 1030)):
            x, angles = torch.randn(5, 3, columns).to(dtype), torch.rand(5, rotated // 2, dtype=torch.float64)
            c, s, h = angles.cos()[:, None], angles.sin()[:, None], x.double()
            first, second = h[..., : rotated // 2], h[..., rotated // 2 : rotated]
            truth = torch.cat((first * c - second * s, second * c + first * s, h[..., rotated:]), -1)
            error = (rotary_embedding(x, angles.cos(), angles.sin()).double() - truth).abs().max()
            assert error / truth.abs().max() < bound, (dtype, columns)
            pairs = torch.view_as_complex(h[..., :rotated].unflatten(-1, (-1, 2)).contiguous()) * torch.complex(c, s)
            truth = torch.cat((torch.view_as_real(pairs).flatten(-2), h[..., rotated:]), -1)
            error = (rotary_embedding(x, angles.cos(), angles.sin(), True).double() - truth).abs().max()
            assert error / truth.abs().max() < bound, (dtype, columns, "interleaved")
"""


@pytest.mark.cpu_backend
@pytest.mark.parametrize("instruction_set", LIBRARY.instruction_sets)
def test_every_instruction_set_is_right(instruction_set, run_on):
    run_on(instruction_set, AGAINST_FLOAT64)


LAYOUTS = {
    "packed": lambda: make(2, 5, 3 * 4 * 16, grad=False)[..., 64:128].unflatten(-1, (4, 16)),
    "heads first": lambda: make(2, 4, 5, 16, grad=False).transpose(1, 2),
    "one sequence, heads first": lambda: make(1, 4, 5, 16, grad=False).transpose(1, 2),
    "expanded": lambda: make(1, 5, 1, 16, grad=False).expand(2, 5, 4, 16),
    "columns apart": lambda: make(2, 5, 4, 32, grad=False)[..., ::2],
    "unaligned": lambda: make(2, 5, 4, 19, grad=False)[..., 1:17],
    "every other token": lambda: make(2, 10, 4, 16, grad=False)[:, ::2],
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_x_and_of_incoming_gradients(layout, interleaved):
    x, (cos, sin) = LAYOUTS[layout](), tables(5, 12)
    own = x.detach().requires_grad_()
    y = rotary_embedding(own, cos, sin, interleaved)
    assert y.is_contiguous()
    torch.testing.assert_close(y, definition(x, cos, sin, interleaved))
    (dx,) = torch.autograd.grad(y, own, x)
    torch.testing.assert_close(dx, definition(x, cos, -sin, interleaved))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("table", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_pair_of_dtypes(dtype, table):
    x, (cos, sin) = make(4, 2, 24, dtype=dtype, grad=False), tables(4, 16, table)
    y = rotary_embedding(x, cos, sin)
    assert y.dtype == dtype
    torch.testing.assert_close(y, definition(x, cos, sin, False))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_opcheck(dtype, interleaved):
    x, (cos, sin) = make(2, 5, 3, 24, dtype=dtype), tables(5, 16)
    torch.library.opcheck(operator.default, (x, cos, sin, interleaved))
    torch.library.opcheck(operator.default, (x.detach().transpose(0, 1).requires_grad_(), *tables(2, 16), True, True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic):
    cos, sin = tables(6, 16)
    check_compiled_equals_eager(lambda x: rotary_embedding(x, cos, sin, True), [make(6, 3, 24)], dynamic=dynamic)


def test_export():
    program = check_export(rotary_embedding, [make(6, 3, 24, grad=False), *tables(6, 16)])
    assert sum("rotary_embedding" in str(node.target) for node in program.graph.nodes) == 1


@pytest.mark.parametrize("interleaved", [False, True])
def test_derivatives_of_x(interleaved):
    x, (cos, sin) = make(3, 2, 8), tables(3, 6, torch.float64)
    check_second_derivatives(lambda x: rotary_embedding(x, cos, sin, interleaved), [x])
    check_gradient_combinations(lambda x: rotary_embedding(x, cos, sin, interleaved), [x])


def test_positions_have_no_gradient():
    x, tables_ = make(3, 2, 8), [t.requires_grad_() for t in tables(3, 6)]
    for function in (rotary_embedding, definition):
        found = torch.autograd.grad(function(x, *tables_, False).sum(), (x, *tables_), allow_unused=True)
        assert [g is None for g in found] == [False, True, True]


def test_functional_transforms():
    x, (cos, sin) = make(3, 2, 8, grad=False), tables(3, 6)
    ours, theirs = (
        torch.func.grad(lambda x, f=f: f(x, cos, sin, False).pow(3).sum())(x) for f in (rotary_embedding, definition)
    )
    torch.testing.assert_close(ours, theirs)


def test_bits_do_not_depend_on_threads_or_other_tokens():
    x, (cos, sin) = make(700, 4, 80), tables(700, 64)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(rotary_embedding(x, cos, sin, True))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])
    check_deterministic(lambda x: rotary_embedding(x, cos, sin), [x])
    check_rows_independent(lambda x: rotary_embedding(x, cos[: len(x)], sin[: len(x)]), [x])


def test_flops_are_counted():
    x, (cos, sin) = make(6, 3, 24), tables(6, 16)
    with FlopCounterMode(display=False) as counter:
        rotary_embedding(x, cos, sin).sum().backward()
    assert counter.get_flop_counts()["Global"][operator] == 2 * 3 * x.numel()


@pytest.mark.parametrize(
    ("x", "cos", "sin", "message"),
    [
        ((4, 8), (4, 4), (4, 4), r"x: shape is \(4, 8\); it needs at least three dimensions"),
        ((4, 2, 0), (4, 1), (4, 1), "x: shape is .* must not be empty"),
        ((4, 2, 8), (3, 4), (3, 4), r"cos: shape is \(3, 4\); it must be \(S, R/2\)"),
        ((2, 4, 2, 8), (3, 4, 4), (3, 4, 4), r"cos: shape is \(3, 4, 4\)"),
        ((4, 2, 8), (4, 4), (4, 3), r"sin: shape is \(4, 3\); it must be that of cos, \(4, 4\)"),
        ((4, 2, 8), (4, 5), (4, 5), r"half of what is rotated of a head, from 1 to D/2 = 4"),
        ((4, 2, 8), (4, 0), (4, 0), r"half of what is rotated of a head, from 1 to D/2 = 4"),
    ],
)
def test_bad_shapes(x, cos, sin, message):
    with pytest.raises(RuntimeError, match=message):
        rotary_embedding(torch.zeros(x), torch.zeros(cos), torch.zeros(sin))


def test_bad_dtypes():
    x, (cos, sin) = make(4, 2, 8, grad=False), tables(4, 8)
    with pytest.raises(RuntimeError, match=r"x: dtype is .*; allowed are"):
        rotary_embedding(x.int(), cos, sin)
    with pytest.raises(RuntimeError, match=r"sin: dtype is torch\.bool"):
        rotary_embedding(x, cos, sin.bool())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_rung_on_cuda(number, interleaved, dtype):
    if reason := levels.unavailable("cuda", torch.device("cuda"), dtype):
        pytest.skip(reason)
    x, (cos, sin) = make(2, 33, 5, 128, dtype=dtype, grad=False).cuda(), (t.cuda() for t in tables(33, 96))
    with rung(number):
        y = operator(x, cos, sin, interleaved)
    torch.testing.assert_close(y, definition(x, cos, sin, interleaved))
