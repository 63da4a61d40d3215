"""`rotary_embedding` beyond what verification asks: models' own code, layouts, operators, in place, bad input."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.harness.checks import (
    check_compiled_equals_eager,
    check_deterministic,
    check_export,
    check_gradient_combinations,
    check_rows_independent,
    check_second_derivatives,
)
from kernel_pytorch.harness.launches import count_launches
from kernel_pytorch.qkv_fusion import rotary_embedding, rotary_embedding_
from kernel_pytorch.qkv_fusion._core import cuda_level

operators = torch.ops.kernel_pytorch
LEVELS = ["reference", "native", "torchscript", "triton", *(["cuda"] if cuda_level.cuda_ops is not None else [])]
SPACES = {"triton": lambda *given: operators.rotary_qk(*given)}
if cuda_level.cuda_ops is not None:
    SPACES["cuda"] = lambda *given: torch.ops.kernel_pytorch_cuda.rotary_qk(*given)
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")


def make(*shape, device, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype).requires_grad_()


def tables(tokens, rotated, device, dtype=torch.float32, batch=()):
    angles = torch.rand(*batch, tokens, rotated // 2, generator=torch.Generator().manual_seed(1)) * 6.28
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


@pytest.mark.parametrize("level", LEVELS)
def test_is_what_transformers_calls_apply_rotary_pos_emb(level, device):
    """q `(B, H, S, D)`, cos and sin `(B, S, D)` with every number twice, as in modeling_llama.py."""
    q, k = make(2, 4, 7, 32, device=device), make(2, 2, 7, 32, device=device)
    half_cos, half_sin = tables(7, 32, device, batch=(2,))
    cos, sin = torch.cat((half_cos, half_cos), -1), torch.cat((half_sin, half_sin), -1)
    ours = rotary_embedding(q.transpose(1, 2), k.transpose(1, 2), cos[..., :16], sin[..., :16], level=level)
    for x, y in zip((q, k), ours, strict=True):
        theirs = x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)
        torch.testing.assert_close(y.transpose(1, 2), theirs)


@pytest.mark.parametrize("level", LEVELS)
def test_is_what_gpt_j_calls_apply_rotary_pos_emb(level, device):
    """x `(B, S, H, D)`, sin and cos `(1, S, 1, R)` with every number twice in a row, as in modeling_gptj.py."""
    x, (cos, sin) = make(2, 7, 4, 32, device=device), tables(7, 16, device)
    rotated, rest = x[..., :16], x[..., 16:]
    c, s = (t.repeat_interleave(2, -1).view(1, 7, 1, 16) for t in (cos, sin))
    every_two = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), -1).flatten(-2)
    theirs = torch.cat((rotated * c + every_two * s, rest), -1)
    torch.testing.assert_close(rotary_embedding(x, x, cos, sin, interleaved=True, level=level)[0], theirs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_inverse_undoes_it(level, interleaved, device):
    q, k = make(5, 3, 10, device=device), make(5, 1, 10, device=device)
    angles = tables(9, 6, device)
    options = {"interleaved": interleaved, "position_ids": torch.tensor([8, 0, 3, 3, 1], device=device), "level": level}
    turned = rotary_embedding(q, k, *angles, **options)
    back = rotary_embedding(*turned, *angles, inverse=True, **options)
    torch.testing.assert_close(back, (q, k))


LAYOUTS = {
    "packed": lambda: torch.randn(2, 5, 3 * 4 * 16)[..., 64:128].unflatten(-1, (4, 16)),
    "heads first": lambda: torch.randn(2, 4, 5, 16).transpose(1, 2),
    "expanded": lambda: torch.randn(1, 5, 1, 16).expand(2, 5, 4, 16),
    "columns apart": lambda: torch.randn(2, 5, 4, 32)[..., ::2],
    "unaligned": lambda: torch.randn(2, 5, 4, 19)[..., 1:17],
    "every other token": lambda: torch.randn(2, 10, 4, 16)[:, ::2],
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_inputs_and_of_incoming_gradients(layout, interleaved, device):
    x, (cos, sin) = LAYOUTS[layout]().to(device), tables(10, 12, device)
    cos, sin = cos[::2], sin[::2]
    own = x.detach().requires_grad_()
    y, z = rotary_embedding(own, x, cos, sin, interleaved=interleaved, level="triton")
    truth = rotary_embedding(x, x, cos, sin, interleaved=interleaved, level="reference")
    torch.testing.assert_close((y, z), truth)
    (dx,) = torch.autograd.grad(y, own, x)
    torch.testing.assert_close(dx, rotary_embedding(x, x, cos, -sin, interleaved=interleaved, level="reference")[0])


def test_one_launch_each_way(device):
    q, k, angles = make(2, 5, 4, 16, device=device), make(2, 5, 2, 16, device=device), tables(5, 16, device)
    with count_launches() as forward:
        y, z = rotary_embedding(q, k, *angles, level="triton")
    with count_launches() as backward:
        (y.sum() + z.sum()).backward()
    assert (forward, backward) == (["_rotate_kernel"], ["_rotate_kernel"])


def test_what_is_frozen_gets_no_gradient(device):
    q, k, angles = make(5, 4, 16, device=device), make(5, 2, 16, device=device).detach(), tables(5, 16, device)
    y, z = rotary_embedding(q, k, *angles, level="triton")
    assert (y.requires_grad, z.requires_grad) == (True, False)
    (dq,) = torch.autograd.grad(y.sum(), q)
    q_only = rotary_embedding(q, k, *angles, level="reference")[0]
    torch.testing.assert_close(dq, torch.autograd.grad(q_only.sum(), q)[0])


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_position_outside_of_the_tables_reads_nothing(dtype, space, device):
    """Columns that pass are what they were."""
    q, k, angles = make(3, 2, 8, device=device).detach(), make(3, 1, 8, device=device).detach(), tables(4, 6, device)
    ids = torch.tensor([3, 4, -1], device=device, dtype=dtype)
    for x, y in zip((q, k), SPACES[space](q, k, *angles, ids, False, False), strict=True):
        assert y[0].isfinite().all()
        assert y[1:, :, :6].isnan().all()
        assert torch.equal(y[1:, :, 6:], x[1:, :, 6:])


@pytest.mark.skipif(cuda_level.cuda_ops is None, reason="kernel_pytorch.cuda_ops is not installed")
@pytest.mark.parametrize("interleaved", [False, True])
def test_cuda_is_one_call_of_one_operator_each_way(interleaved, device):
    q, k, angles = make(2, 5, 4, 16, device=device), make(2, 5, 2, 16, device=device), tables(9, 16, device)
    ids = torch.tensor([8, 0, 3, 3, 1], device=device)
    operators_called = []

    class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            operators_called.append(str(operator))
            return operator(*args, **(kwargs or {}))

    with Recorded():
        y, z = rotary_embedding(q, k, *angles, interleaved=interleaved, position_ids=ids, level="cuda")
    assert [name for name in operators_called if name.startswith("kernel_pytorch")] == [
        "kernel_pytorch_cuda.rotary_qk.default"
    ]
    assert not any("index" in name for name in operators_called)
    truth = rotary_embedding(q, k, *angles, interleaved=interleaved, position_ids=ids, level="reference")
    torch.testing.assert_close((y, z), truth)
    incoming = torch.randn_like(y), torch.randn_like(z)
    with Recorded():
        operators_called.clear()
        found = torch.autograd.grad((y, z), (q, k), incoming)
    assert operators_called == ["kernel_pytorch_cuda.rotary_qk.default"]
    torch.testing.assert_close(found, torch.autograd.grad(truth, (q, k), incoming))


@pytest.mark.parametrize("level", [None, *LEVELS])
@pytest.mark.parametrize("rotate", [rotary_embedding, rotary_embedding_])
def test_positions_outside_of_the_tables_are_named_on_a_cpu(rotate, level, device):
    """In each call: matching calls have other values."""
    if torch.device(device).type != "cpu":
        pytest.skip("values are read on a CPU alone")
    q, k, angles = torch.zeros(2, 3, 2, 8), torch.zeros(2, 3, 1, 8), tables(4, 8, "cpu")
    ids = torch.tensor([[3, 0, 1], [2, 2, 0]])
    for wrong in (4, -1, -4, 2**40):
        rotate(q, k, *angles, position_ids=ids, level=level)
        with pytest.raises(ValueError, match=rf"^position_ids: given {wrong}; the tables have rows 0 to 3$"):
            rotate(q, k, *angles, position_ids=ids.where(ids != 1, wrong), level=level)
    with pytest.raises(ValueError, match=r"^position_ids: given 0; the tables have no rows$"):
        rotate(q, k, *(t[:0] for t in angles), position_ids=ids.clamp(max=0), level=level)
    rotate(q[:, :0], k[:, :0], *angles, position_ids=ids[:, :0], level=level)


def test_positions_are_not_read_where_that_would_end_a_trace():
    x, angles, ids = torch.zeros(3, 2, 8), tables(4, 8, "cpu"), torch.tensor([0, 3, -1])

    def turned(x, ids):
        return rotary_embedding(x, x, *angles, position_ids=ids, level="native")[0]

    assert torch.equal(torch.compile(turned, fullgraph=True, backend="eager")(x, ids), x)
    assert torch.func.vmap(turned, in_dims=(0, None))(x[None], ids).shape == (1, 3, 2, 8)
    assert make_fx(turned)(x, ids)(x, ids).shape == x.shape
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert turned(torch.zeros(3, 2, 8), torch.tensor([0, 3, -1])).shape == x.shape


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("heads_first", [False, True])
def test_in_place(level, heads_first, device):
    """Columns that pass are not written."""
    q, k = (make(2, 5, h, 24, device=device).detach() for h in (4, 2))
    if heads_first:
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    angles, versions = tables(5, 16, device), (q._version, k._version)
    truth = rotary_embedding(q, k, *angles, interleaved=heads_first, level="reference")
    found = rotary_embedding_(q, k, *angles, interleaved=heads_first, level=level)
    assert found[0] is q
    assert found[1] is k
    assert (q._version, k._version) > versions
    torch.testing.assert_close(found, truth)


def test_in_place_refuses_what_it_cannot(device):
    q, angles = make(5, 2, 8, device=device), tables(5, 8, device)
    with pytest.raises(RuntimeError, match="has no gradient: call it under"):
        rotary_embedding_(q, q.clone(), *angles)
    apart = torch.randn(5, 2, 16, device=device)[..., ::2]
    with pytest.raises(ValueError, match=r"q: strides are \(32, 16, 2\); columns must lie side by side"):
        rotary_embedding_(apart, apart.clone(), *angles, level="triton")


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_in_place_refuses_the_same_tensor_twice(level, device):
    """It would be rotated twice."""
    x, angles = make(5, 4, 8, device=device).detach(), tables(5, 8, device)
    before = x.clone()
    for k in (x, x[:, :2], x.view(5, 4, 8)):
        with pytest.raises(ValueError, match=r"^k: it begins at the address of q; they must not share memory"):
            rotary_embedding_(x, k, *angles, level=level)
    assert torch.equal(x, before)
    nothing = x[None, :0]
    rotary_embedding_(nothing, nothing, *(t[:0] for t in angles), level=level)
    q, k = x.split((2, 2), 1)
    rotary_embedding_(q, k, *angles, level=level)
    torch.testing.assert_close(x, rotary_embedding(before, before, *angles, level="reference")[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
@pytest.mark.parametrize("interleaved", [False, True])
def test_opcheck(interleaved, device):
    q, k, angles = make(2, 5, 3, 24, device=device), make(2, 5, 1, 24, device=device), tables(5, 16, device)
    ids = torch.tensor([[4, 1, 1, 0, 2]], device=device).expand(2, 5)
    torch.library.opcheck(operators.rotary_qk.default, (q, k, *angles, None, interleaved, False))
    torch.library.opcheck(operators.rotary_qk.default, (q, k, *angles, ids, interleaved, True))
    torch.library.opcheck(operators.rotary_qk.default, (None, k, *angles, None, interleaved, True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic, device):
    angles = tables(6, 16, device)
    check_compiled_equals_eager(
        lambda q, k: rotary_embedding(q, k, *angles, level="triton"),
        [make(6, 3, 24, device=device), make(6, 2, 24, device=device)],
        dynamic=dynamic,
    )


def test_export(device):
    given = [make(6, 3, 24, device=device).detach(), make(6, 2, 24, device=device).detach(), *tables(6, 16, device)]
    program = check_export(lambda *t: rotary_embedding(*t, level="triton"), given)
    assert sum("rotary_qk" in str(node.target) for node in program.graph.nodes) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_derivatives(level, device):
    q, k = make(2, 2, 6, device=device), make(2, 1, 6, device=device)
    angles = tables(2, 4, device, torch.float64)
    check_second_derivatives(lambda q, k: rotary_embedding(q, k, *angles, interleaved=True, level=level), [q, k])
    check_gradient_combinations(lambda q, k: rotary_embedding(q, k, *angles, level=level), [q, k])


def test_bits_do_not_depend_on_other_tokens(device):
    q, k, (cos, sin) = make(70, 4, 80, device=device), make(70, 1, 80, device=device), tables(70, 64, device)
    check_deterministic(lambda q, k: rotary_embedding(q, k, cos, sin, level="triton"), [q, k])
    check_rows_independent(
        lambda q, k: rotary_embedding(q, k, cos[: len(q)], sin[: len(q)], level="triton"), [q.detach(), k.detach()]
    )


def test_flops_are_counted(device):
    q, k, angles = make(6, 3, 24, device=device), make(6, 2, 24, device=device), tables(6, 16, device)
    with FlopCounterMode(display=False) as counter:
        sum(y.sum() for y in rotary_embedding(q, k, *angles, level="triton")).backward()
    assert counter.get_flop_counts()["Global"][operators.rotary_qk] == 2 * 3 * (q.numel() + k.numel())


BAD = {
    "q: shape is (4, 8); it must be (..., S, H, D)": {"q": (4, 8)},
    "k: shape is (4, 2, 6); it must be that of q, (4, 2, 8), but for the number of heads": {"k": (4, 2, 6)},
    "cos: shape is (3, 4); without position_ids it must have a row for each token": {"cos": (3, 4), "sin": (3, 4)},
    "sin: shape is (4, 3); it must be that of cos, (4, 4)": {"sin": (4, 3)},
    "cos: shape is (4, 5); its last dimension is half of what is rotated": {"cos": (4, 5), "sin": (4, 5)},
    "position_ids: shape is (5,); it must be (4,) or (4,)": {"position_ids": (5,)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_shapes(message, device):
    shapes = {"q": (4, 2, 8), "k": (4, 2, 8), "cos": (4, 4), "sin": (4, 4)} | BAD[message]
    given = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    given |= {"position_ids": given["position_ids"].long()} if "position_ids" in given else {}
    with pytest.raises(ValueError) as error:
        rotary_embedding(**given)
    assert message in str(error.value)


def test_bad_kinds(device):
    x, (cos, sin) = make(4, 2, 8, device=device).detach(), tables(4, 8, device)
    with pytest.raises(TypeError, match=r"q: dtype is torch\.int32; allowed are"):
        rotary_embedding(x.int(), x, cos, sin)
    with pytest.raises(TypeError, match=r"k: dtype is torch\.float16; it must be that of q, torch\.float32"):
        rotary_embedding(x, x.half(), cos, sin)
    with pytest.raises(TypeError, match=r"position_ids: dtype is torch\.float32"):
        rotary_embedding(x, x, cos, sin, position_ids=x[:, 0, 0])
    with pytest.raises(TypeError, match="interleaved: given 1; it must be True or False"):
        rotary_embedding(x, x, cos, sin, interleaved=1)


def test_calling_the_operator_checks_what_would_read_foreign_memory(device):
    x, (cos, sin) = make(4, 2, 8, device=device).detach(), tables(4, 8, device)
    with pytest.raises(ValueError, match=r"cos: shape is \(3, 4\)"):
        operators.rotary_qk(x, x, cos[:3], sin[:3], None, False, False)
    with pytest.raises(ValueError, match=r"k: shape is \(3, 2, 8\)"):
        operators.rotary_qk(x, x[:3], cos, sin, None, False, False)
    with pytest.raises(ValueError, match="q: given None, and k too"):
        operators.rotary_qk(None, None, cos, sin, None, False, False)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(0, 2, 16), (0, 3, 2, 16), (2, 0, 2, 16)])
def test_no_tokens_are_rotated_in_place(shape, level, device):
    q, k = torch.empty(shape, device=device), torch.empty(shape, device=device)
    angles = [torch.ones(shape[-3], 8, device=device) for _ in range(2)]
    assert rotary_embedding_(q, k, *angles, level=level)[0] is q
