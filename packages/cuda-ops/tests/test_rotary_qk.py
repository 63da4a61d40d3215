"""`rotary_qk` beyond what verification asks: both tensors or one, positions, layouts, dtypes, gradients, bad input."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.cuda_ops import LIBRARY, levels, rotary_embedding, rotary_qk
from kernel_pytorch.cuda_ops.operators import operators
from kernel_pytorch.cuda_ops.rungs import rung
from kernel_pytorch.harness.checks import (
    check_compiled_equals_eager,
    check_deterministic,
    check_export,
    check_gradient_combinations,
    check_rows_independent,
    check_second_derivatives,
)

operator = operators.rotary_qk
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6, torch.float64: 4e-15}


def make(*shape, dtype=torch.float32, grad=False):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).requires_grad_(grad)


def tables(rows, rotated, dtype=torch.float32, batch=()):
    angles = torch.rand(*batch, rows, rotated // 2, generator=torch.Generator().manual_seed(1)) * 6.28
    return angles.cos().to(dtype), angles.sin().to(dtype)


def positions(rows, *shape, dtype=torch.int64):
    return torch.randint(rows, shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def oracle(x, cos, sin, position_ids=None, interleaved=False, inverse=False):
    """In float64; NaN for positions outside of the tables."""
    c, s = cos.double(), sin.double()
    if position_ids is not None:
        outside = (position_ids < 0) | (position_ids >= len(cos))
        c, s = (t.new_full((1, t.shape[-1]), torch.nan) if not len(t) else t for t in (c, s))
        c, s = (t[position_ids.long().where(~outside, 0)] for t in (c, s))
        c, s = (t.masked_fill(outside.unsqueeze(-1), torch.nan) for t in (c, s))
    c, s, h, rotated = c.unsqueeze(-2), (-s if inverse else s).unsqueeze(-2), x.double(), 2 * cos.shape[-1]
    if interleaved:
        first, second = h[..., 0:rotated:2], h[..., 1:rotated:2]
        y = torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)
    else:
        first, second = h[..., :rotated].chunk(2, -1)
        y = torch.cat((first * c - second * s, second * c + first * s), -1)
    return torch.cat((y, h[..., rotated:]), -1)


def assert_near(found, truth, dtype):
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.equal(found.isnan(), truth.isnan())
    error = (found.double() - truth).nan_to_num().abs().max() if truth.numel() else 0.0
    assert error <= BOUNDS[dtype] * max(1.0, truth.nan_to_num().abs().max().item() if truth.numel() else 0.0)


# Leading dimensions, heads of q, heads of k, columns, columns that are rotated.
SHAPES = {
    "one head each": ((5,), 1, 1, 2, 2),
    "odd numbers of heads": ((2, 5), 3, 5, 32, 32),
    "grouped queries": ((2, 7), 8, 2, 64, 64),
    "one key for all": ((3, 5), 7, 1, 64, 32),
    "an odd head": ((9,), 3, 2, 7, 6),
    "no multiple of 8": ((2, 3), 4, 2, 20, 12),
    "odd halves": ((2, 3), 2, 5, 70, 70),
    "partial": ((4,), 3, 1, 80, 32),
    "longer than a block": ((2,), 1, 2, 8200, 8192),
    "five dimensions": ((2, 1, 3), 2, 1, 24, 16),
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_both_and_their_gradients(name, dtype, interleaved):
    tokens, heads, keys, columns, rotated = SHAPES[name]
    q, k = make(*tokens, heads, columns, dtype=dtype, grad=True), make(*tokens, keys, columns, dtype=dtype, grad=True)
    by_token = tables(tokens[-1], rotated)
    by_position = tables(11, rotated)
    for angles, ids in (
        (by_token, None),
        (tables(tokens[-1], rotated, batch=tokens[:-1]), None),
        (by_position, positions(11, tokens[-1])),
        (by_position, positions(11, *tokens, dtype=torch.int32)),
    ):
        found = rotary_qk(q, k, *angles, ids, interleaved)
        incoming = [torch.randn_like(y) for y in found]
        gradients = torch.autograd.grad(found, (q, k), incoming)
        for x, y, dx, dy in zip((q, k), found, gradients, incoming, strict=True):
            assert_near(y, oracle(x, *angles, ids, interleaved), dtype)
            assert_near(dx, oracle(dy, *angles, ids, interleaved, inverse=True), dtype)


@pytest.mark.cpu_backend
@pytest.mark.parametrize("instruction_set", LIBRARY.instruction_sets)
def test_every_instruction_set_has_the_same_positions(instruction_set, run_on):
    program = """
        import torch
        from kernel_pytorch.cuda_ops import rotary_embedding, rotary_qk
        torch.manual_seed(0)
        ids = torch.tensor([3, 0, 9, -1, 2**40, 4])
        rows = ids.clamp(0, 4)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for columns, rotated in ((2, 2), (7, 6), (70, 64), (64, 64)):
                q, k = torch.randn(6, 3, columns).to(dtype), torch.randn(6, 2, columns).to(dtype)
                angles = torch.rand(5, rotated // 2)
                for interleaved in (False, True):
                    found = rotary_qk(q, k, angles.cos(), angles.sin(), ids, interleaved)
                    for x, y in zip((q, k), found):
                        truth = rotary_embedding(x, angles.cos()[rows], angles.sin()[rows], interleaved)
                        truth[2:5, :, :rotated] = torch.nan
                        assert torch.equal(y.isnan(), truth.isnan())
                        assert torch.equal(y.nan_to_num(), truth.nan_to_num())
    """
    run_on(instruction_set, program)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns", [7, 32, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_one_tensor_at_a_time(dtype, columns, interleaved):
    q, k, angles = make(2, 5, 4, columns, dtype=dtype), make(2, 5, 3, columns, dtype=dtype), tables(9, columns // 4 * 2)
    ids = positions(9, 2, 5)
    one_by_one = [rotary_embedding(x, *(t[ids] for t in angles), interleaved, True) for x in (q, k)]
    together = rotary_qk(q, k, *angles, ids, interleaved, True)
    assert all(map(torch.equal, together, one_by_one))
    alone = operator(q, None, *angles, ids, interleaved, True), operator(None, k, *angles, ids, interleaved, True)
    assert torch.equal(alone[0][0], together[0])
    assert torch.equal(alone[1][1], together[1])
    assert (alone[0][1].shape, alone[1][0].shape) == ((0,), (0,))


LAYOUTS = {
    "packed": lambda: make(2, 5, 6 * 16).unflatten(-1, (6, 16)).split((4, 2), -2),
    "heads first": lambda: (make(2, 4, 5, 16).transpose(1, 2), make(2, 2, 5, 16).transpose(1, 2)),
    "one of each": lambda: (make(2, 4, 5, 16).transpose(1, 2), make(2, 5, 2, 16)),
    "expanded": lambda: (make(1, 5, 1, 16).expand(2, 5, 4, 16), make(2, 5, 1, 16).expand(2, 5, 3, 16)),
    "columns apart": lambda: (make(2, 5, 4, 32)[..., ::2], make(2, 5, 2, 16)),
    "q unaligned": lambda: (make(2, 5, 4, 19)[..., 1:17], make(2, 5, 2, 16)),
    "k unaligned": lambda: (make(2, 5, 4, 16), make(2, 5, 2, 18)[..., 1:17]),
    "every other token": lambda: (make(2, 10, 4, 16)[:, ::2], make(2, 10, 2, 16)[:, ::2]),
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_inputs_and_of_incoming_gradients(layout, interleaved):
    given = LAYOUTS[layout]()
    own, kept = [x.detach().requires_grad_() for x in given], [x.clone() for x in given]
    cos, sin = (t[::2] for t in tables(18, 12))
    ids = positions(9, 2, 5)
    found = rotary_qk(*own, cos, sin, ids, interleaved)
    gradients = torch.autograd.grad(found, own, given)
    for x, before, y, dx in zip(given, kept, found, gradients, strict=True):
        assert torch.equal(x, before)
        assert_near(y, oracle(x, cos, sin, ids, interleaved), torch.float32)
        assert_near(dx, oracle(x, cos, sin, ids, interleaved, inverse=True), torch.float32)


POSITIONS = {
    "shared": lambda dtype: positions(9, 5, dtype=dtype),
    "shared, every other": lambda dtype: positions(9, 10, dtype=dtype)[::2],
    "expanded": lambda dtype: positions(9, 1, 5, dtype=dtype).expand(3, 5),
    "transposed": lambda dtype: positions(9, 5, 3, dtype=dtype).t(),
    "rows apart": lambda dtype: positions(9, 3, 8, dtype=dtype)[:, 1:6],
    "one for all": lambda dtype: torch.tensor([[4]], dtype=dtype).expand(3, 5),
    "one for a sequence": lambda dtype: positions(9, 3, 1, dtype=dtype).expand(3, 5),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", POSITIONS)
def test_strides_of_positions(name, dtype):
    q, k, angles, ids = make(3, 5, 2, 16), make(3, 5, 1, 16), tables(9, 8), POSITIONS[name](dtype)
    for x, y in zip((q, k), rotary_qk(q, k, *angles, ids), strict=True):
        assert_near(y, oracle(x, *angles, ids), torch.float32)


@pytest.mark.parametrize("columns", [7, 32])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_position_outside_of_the_tables_reads_nothing(dtype, columns):
    """Also where its low 32 bits are a row, and where the tables have no rows."""
    q, k, angles = make(6, 2, columns, grad=True), make(6, 3, columns), tables(4, 6)
    outside = (2**31 - 1, -(2**31)) if dtype == torch.int32 else (2**32 + 1, -(2**63))
    ids = torch.tensor([3, 4, -1, 0, *outside], dtype=dtype)
    found = rotary_qk(q, k, *angles, ids)
    for x, y in zip((q, k), found, strict=True):
        assert_near(y, oracle(x, *angles, ids), torch.float32)
        assert y.isnan().any(-1).all(-1).tolist() == [False, True, True, False, True, True]
    (dq,) = torch.autograd.grad(found[0], q, torch.ones_like(q))
    assert torch.equal(dq.isnan(), found[0].isnan())
    for x, y in zip((q, k), rotary_qk(q, k, *(t[:0] for t in angles), ids), strict=True):
        assert y[..., :6].isnan().all()
        assert torch.equal(y[..., 6:], x[..., 6:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table", DTYPES)
@pytest.mark.parametrize("with_positions", [False, True])
def test_every_pair_of_dtypes(dtype, table, with_positions):
    q, k, (cos, sin) = make(4, 2, 24, dtype=dtype), make(4, 1, 24, dtype=dtype), tables(4, 16, table)
    ids = positions(4, 4) if with_positions else None
    for x, y in zip((q, k), rotary_qk(q, k, cos, sin, ids), strict=True):
        assert_near(y, oracle(x, cos, sin, ids), dtype)


@pytest.mark.parametrize("tokens", [(0,), (0, 3), (2, 0)])
@pytest.mark.parametrize("with_positions", [False, True])
def test_no_tokens(tokens, with_positions):
    q, k, angles = make(*tokens, 2, 16, grad=True), make(*tokens, 1, 16, grad=True), tables(5, 8)
    ids = torch.zeros(tokens, dtype=torch.int64) if with_positions else None
    angles = angles if with_positions else tuple(t[: tokens[-1]].repeat(3, 1)[: tokens[-1]] for t in angles)
    y, z = rotary_qk(q, k, *angles, ids)
    assert (y.shape, z.shape) == (q.shape, k.shape)
    (y.sum() + z.sum()).backward()
    assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_opcheck(dtype, interleaved):
    q, k, angles = make(2, 5, 3, 24, dtype=dtype, grad=True), make(2, 5, 1, 24, dtype=dtype, grad=True), tables(5, 16)
    ids = positions(5, 1, 5).expand(2, 5)
    for given in ((q, k, *angles, None), (q, k, *angles, ids), (None, k, *angles, ids), (q, None, *angles, None)):
        torch.library.opcheck(operator.default, (*given, interleaved, interleaved))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic):
    angles, ids = tables(9, 16), positions(9, 6)
    given = [make(6, 3, 24, grad=True), make(6, 2, 24, grad=True)]
    check_compiled_equals_eager(lambda q, k: rotary_qk(q, k, *angles, ids, True), given, dynamic=dynamic)


def test_export():
    def rotated(q, k, cos, sin):
        return rotary_qk(q, k, cos, sin, torch.arange(q.shape[0]) + 1)

    program = check_export(rotated, [make(6, 3, 24), make(6, 2, 24), *tables(19, 16)])
    assert sum("rotary_qk" in str(node.target) for node in program.graph.nodes) == 1


@pytest.mark.parametrize("interleaved", [False, True])
def test_derivatives(interleaved):
    q, k, angles, ids = make(3, 2, 8, grad=True), make(3, 1, 8, grad=True), tables(5, 6, torch.float64), positions(5, 3)
    check_second_derivatives(lambda q, k: rotary_qk(q, k, *angles, ids, interleaved), [q, k])
    check_gradient_combinations(lambda q, k: rotary_qk(q, k, *angles, ids, interleaved), [q, k])


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_output_is_used(used):
    own, angles = [make(3, 2, 8, grad=True), make(3, 1, 8, grad=True)], tables(3, 6)
    found = torch.autograd.grad(rotary_qk(*own, *angles)[used].sum(), own, allow_unused=True)
    assert [g is None for g in found] == [used == 1, used == 0]
    assert_near(found[used], oracle(torch.ones_like(own[used]), *angles, inverse=True), torch.float32)


def test_positions_and_tables_have_no_gradient():
    q, k, ids = make(3, 2, 8, grad=True), make(3, 1, 8), positions(5, 3)
    angles = [t.requires_grad_() for t in tables(5, 6)]
    y, z = rotary_qk(q, k, *angles, ids)
    assert (y.requires_grad, z.requires_grad) == (True, False)
    found = torch.autograd.grad(y.sum(), (q, *angles), allow_unused=True)
    assert [g is None for g in found] == [False, True, True]


def test_bits_do_not_depend_on_threads_or_other_tokens():
    q, k, angles, ids = make(700, 4, 80), make(700, 1, 80), tables(50, 64), positions(50, 700)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(rotary_qk(q, k, *angles, ids, True))
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])
    check_deterministic(lambda q, k: rotary_qk(q, k, *angles, ids), [q.requires_grad_(), k])
    check_rows_independent(lambda q, k: rotary_qk(q, k, *angles, ids[: len(q)]), [q.detach(), k])


def test_flops_are_counted():
    q, k, angles = make(6, 3, 24, grad=True), make(6, 2, 24, grad=True), tables(6, 16)
    with FlopCounterMode(display=False) as counter:
        sum(y.sum() for y in rotary_qk(q, k, *angles)).backward()
    assert counter.get_flop_counts()["Global"][operator] == 2 * 3 * (q.numel() + k.numel())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": None, "k": None}, "q: given None, and k too; one of them must be a tensor"),
        ({"k": torch.zeros(3, 2, 8)}, r"k: shape is \(3, 2, 8\); it must be that of q, \(4, 2, 8\), but for"),
        ({"k": torch.zeros(4, 2, 6)}, r"k: shape is \(4, 2, 6\); it must be that of q"),
        ({"k": torch.zeros(1, 4, 2, 8)}, r"k: shape is \(1, 4, 2, 8\); it must be that of q"),
        ({"k": torch.zeros(4, 2, 8).half()}, "k: dtype is torch.float16; it must be that of q, torch.float32"),
        ({"k": torch.zeros(4, 8)}, r"k: shape is \(4, 8\); it needs at least three dimensions"),
        ({"cos": torch.zeros(3, 4), "sin": torch.zeros(3, 4)}, r"cos: shape is \(3, 4\); it must be \(S, R/2\)"),
        ({"q": torch.zeros(4, 2, 8).int()}, "q: dtype is torch.int32; allowed are"),
        ({"position_ids": torch.zeros(5).long()}, r"position_ids: shape is \(5,\); it must be \(S,\), or"),
        ({"position_ids": torch.zeros(4, 2).long()}, r"position_ids: shape is \(4, 2\); it must be"),
        ({"position_ids": torch.tensor(1)}, r"position_ids: shape is \(\); it must be"),
        ({"position_ids": torch.zeros(4)}, "position_ids: dtype is torch.float32; allowed are"),
    ],
)
def test_bad_input(change, message):
    given = {name: torch.zeros(4, 2, 8) for name in ("q", "k")} | {name: torch.zeros(4, 4) for name in ("cos", "sin")}
    with pytest.raises(RuntimeError, match=f"^rotary_qk: {message}"):
        rotary_qk(**given | change)


@pytest.mark.parametrize(
    ("cos", "sin", "message"),
    [
        ((1, 9, 4), (9, 4), r"cos: shape is \(1, 9, 4\); with position_ids it must be \(P, R/2\)"),
        ((9, 4), (9, 3), r"sin: shape is \(9, 3\); it must be that of cos, \(9, 4\)"),
        ((9, 4), (8, 4), r"sin: shape is \(8, 4\); it must be that of cos, \(9, 4\)"),
        ((9, 5), (9, 5), "cos: shape is .* half of what is rotated of a head, from 1 to D/2 = 4"),
        ((9, 0), (9, 0), "cos: shape is .* half of what is rotated of a head, from 1 to D/2 = 4"),
    ],
)
def test_bad_tables_with_positions(cos, sin, message):
    x = torch.zeros(4, 2, 8)
    with pytest.raises(RuntimeError, match=f"^rotary_qk: {message}"):
        rotary_qk(x, x, torch.zeros(cos), torch.zeros(sin), torch.zeros(4).long())


def test_an_operator_that_is_called_directly_checks_positions_too():
    x, angles = torch.zeros(4, 2, 8), tables(4, 8)
    with pytest.raises(RuntimeError, match="position_ids: allowed dtypes are int64 and int32"):
        operator(x, x, *angles, torch.zeros(4), False, False)
    with pytest.raises(RuntimeError, match=r"sin: dtype is torch\.bool"):
        operator(x, x, angles[0], angles[1].bool(), positions(4, 4), False, False)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_positions", [False, True])
def test_every_rung(with_positions, dtype, interleaved, device):
    """On a GPU and in the emulator; the CPU backend is one kernel."""
    if device.type == "cuda" and (reason := levels.unavailable("cuda", device, dtype)):
        pytest.skip(reason)
    rows, ids = (40, positions(40, 2, 33)) if with_positions else (33, None)
    if with_positions:
        ids[0, :2] = torch.tensor([-1, 40])
    q, k, angles = make(2, 33, 5, 128, dtype=dtype), make(2, 33, 3, 128, dtype=dtype), tables(rows, 96)
    truths = [oracle(x, *angles, ids, interleaved) for x in (q, k)]
    given = [None if t is None else t.to(device) for t in (q, k, *angles, ids)]
    for number in (1, 2, 3):
        with rung(number):
            found = operator(*given, interleaved, False)
        for y, truth in zip(found, truths, strict=True):
            assert_near(y.cpu(), truth, dtype)


@pytest.mark.parametrize(("heads", "keys"), [(1, 9), (9, 1), (5, 4)])
@pytest.mark.parametrize(("columns", "rotated"), [(64, 32), (40, 40)])
def test_several_heads_a_thread(heads, keys, columns, rotated, device):
    """So many elements that a thread of the vectorized kernel has several heads, with heads that are no multiple."""
    if device.type == "cpu" and LIBRARY.instruction_sets != ("CUDA, emulated",):
        pytest.skip("the CPU backend is one kernel")
    tokens = 132 * 2048 * 32 // ((heads + keys) * columns) + 1
    q, k = (make(tokens, n, columns, dtype=torch.bfloat16) for n in (heads, keys))
    angles, ids = tables(7, rotated), positions(7, tokens)
    truths = [oracle(x, *angles, ids) for x in (q, k)]
    found = rotary_qk(*(t.to(device) for t in (q, k, *angles, ids)))
    for y, truth in zip(found, truths, strict=True):
        assert_near(y.cpu(), truth, torch.bfloat16)
