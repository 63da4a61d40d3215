"""Gated linear units: what they compute and refuse, their gradients, kernels, operators and modules."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.fused_ln_act import GEGLU, SwiGLU, geglu, reglu, swiglu
from kernel_pytorch.harness.checks import (
    check_compiled_equals_eager,
    check_deterministic,
    check_export,
    check_gradient_combinations,
    check_rows_independent,
    check_second_derivatives,
)
from kernel_pytorch.harness.launches import count_launches

LEVELS = ["reference", "native", "torchscript", "triton"]  # "compile" is held by the declaration's tests
operators = torch.ops.kernel_pytorch
pytestmark = [pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated"), pytest.mark.slow]

VARIANTS = {
    "swiglu": (swiglu, {}),
    "gpt-oss": (swiglu, {"alpha": 1.702, "limit": 0.7, "offset": 1.0}),
    "geglu": (geglu, {}),
    "geglu, tanh": (geglu, {"approximate": "tanh", "limit": 0.7}),
    "reglu": (reglu, {"limit": 0.7}),
}


def halves(*shape, device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]


# What they compute.


def gpt_oss(x, alpha=1.702, limit=7.0):
    """gpt-oss's own function, written out; its pairs are gate and up by turns."""
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


@pytest.mark.parametrize("level", LEVELS)
def test_gpt_oss(level, device):
    torch.manual_seed(0)
    x = 5 * torch.randn(7, 40, device=device)
    ours = swiglu(x[..., ::2], x[..., 1::2], alpha=1.702, limit=7.0, offset=1.0, level=level)
    torch.testing.assert_close(ours, gpt_oss(x))


@pytest.mark.parametrize("level", LEVELS)
def test_they_are_an_activation_times_up(level, device):
    gate, up = halves(5, 33, device=device)
    torch.testing.assert_close(swiglu(gate, up, level=level), F.silu(gate) * up)
    torch.testing.assert_close(geglu(gate, up, level=level), F.gelu(gate) * up)
    torch.testing.assert_close(geglu(gate, up, approximate="tanh", level=level), F.gelu(gate, approximate="tanh") * up)
    torch.testing.assert_close(reglu(gate, up, level=level), F.relu(gate) * up)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", VARIANTS)
def test_packed_is_the_same(name, level, device):
    function, options = VARIANTS[name]
    gate, up = (t.requires_grad_() for t in halves(2, 3, 33, device=device))
    packed = torch.cat([gate, up], -1).detach().requires_grad_()
    two, one = function(gate, up, **options, level=level), function(packed, **options, level=level)
    # On the CPU PyTorch computes what is not contiguous by other instructions.
    exact = {"rtol": 0, "atol": 0} if level == "triton" else {}
    torch.testing.assert_close(one, two, **exact)
    incoming = torch.randn_like(two)
    (dpacked,) = torch.autograd.grad(one, packed, incoming)
    torch.testing.assert_close(dpacked, torch.cat(torch.autograd.grad(two, (gate, up), incoming), -1), **exact)
    assert dpacked.is_contiguous()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("gate_dtype", "up_dtype", "expected"),
    [
        (torch.float16, torch.float16, torch.float16),
        (torch.float16, torch.float32, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_dtypes(level, gate_dtype, up_dtype, expected, device):
    gate, up = (t.requires_grad_() for t in halves(4, 8, device=device))
    y = swiglu(gate.to(gate_dtype), up.to(up_dtype), level=level)
    assert y.dtype == expected


BAD = {
    "no tensor": (lambda x: swiglu([1.0]), TypeError, "gate: given list"),
    "integer gate": (lambda x: reglu(x.long(), x), TypeError, "gate: dtype is torch.int64; allowed are"),
    "integer up": (lambda x: geglu(x, x.int()), TypeError, "up: dtype is torch.int32"),
    "odd packed": (lambda x: swiglu(x[:, :7]), ValueError, r"gate: shape is \(4, 7\); packed with up, .* must be even"),
    "shapes": (lambda x: swiglu(x, x[:, :4]), ValueError, r"up: shape is \(4, 4\); it must be that of gate, \(4, 8\)"),
    "devices": (lambda x: swiglu(x, x.to("meta")), ValueError, "up: device is meta; it must be that of gate"),
    "limit": (lambda x: swiglu(x, limit=0.0), ValueError, "limit: given 0.0; it must be positive, or None"),
    "limit text": (lambda x: geglu(x, limit="7"), TypeError, "limit: given str"),
    "alpha": (lambda x: swiglu(x, alpha=float("nan")), ValueError, "alpha: given nan; it must be finite"),
    "offset": (lambda x: swiglu(x, offset=None), TypeError, "offset: given NoneType"),
    "approximate": (lambda x: geglu(x, approximate="erf"), ValueError, "approximate: given 'erf'; allowed are"),
    "level": (lambda x: swiglu(x, level="cutlass"), ValueError, "level: given 'cutlass'"),
    "module, level": (lambda x: SwiGLU(level="tritn"), ValueError, "level: given 'tritn'"),
    "operator, shapes": (lambda x: operators.gated(x, x[:2], "silu", 1.0, None, 0.0), ValueError, "up: shape is"),
    "operator, odd": (lambda x: operators.gated(x[:, 1:], None, "silu", 1.0, None, 0.0), ValueError, "must be even"),
    "operator, name": (lambda x: operators.gated(x, x, "swish", 1.0, None, 0.0), ValueError, "given 'swish'"),
    "operator, dtype": (lambda x: operators.gated(x.int(), None, "silu", 1.0, None, 0.0), TypeError, "gate: dtype"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call(torch.ones(4, 8))


# Gradients.


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_combination_of_inputs_twice(name, level, device):
    function, options = VARIANTS[name]
    arguments = halves(3, 4, device=device, dtype=torch.float64)
    check_gradient_combinations(lambda *t: function(*t, **options, level=level), arguments)
    check_second_derivatives(lambda *t: function(*t, **options, level=level), arguments, fast=True)
    check_second_derivatives(lambda t: function(t, **options, level=level), arguments[:1], fast=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_formula_equals_kernel(name, packed, device):
    function, options = VARIANTS[name]
    own = [t.requires_grad_() for t in halves(3, 8, device=device, dtype=torch.float64)][: 1 if packed else 2]
    y = function(*own, **options, level="triton")
    incoming = torch.randn_like(y)
    kernel = torch.autograd.grad(y, own, incoming, retain_graph=True)
    formula = torch.autograd.grad(y, own, incoming, create_graph=True)
    for ours, theirs in zip(kernel, formula, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_is_saved_but_the_inputs(packed, device):
    own = [t.requires_grad_() for t in halves(4, 8, device=device)][: 1 if packed else 2]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        swiglu(*own, level="triton")
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in own}


# Kernels.


@pytest.mark.parametrize("packed", [False, True])
def test_one_launch_each_way(packed, device):
    own = [t.requires_grad_() for t in halves(21, 600, device=device)][: 1 if packed else 2]
    with count_launches() as forward:
        y = swiglu(*own, level="triton")
    with count_launches() as backward:
        y.backward(torch.ones_like(y))
    assert (forward, backward) == (["_gated_forward_kernel"], ["_gated_backward_kernel"])


def test_packed_halves_are_not_copied(device):
    triton_forward = pytest.importorskip("kernel_pytorch.fused_ln_act.gated.kernels.forward")
    wide = torch.randn(6, 3, 100, device=device)
    packed = wide[..., :64]  # rows with gaps
    gate, up = triton_forward.as_halves(packed, None)
    assert gate.data_ptr() == packed.data_ptr()
    assert up.data_ptr() == packed[..., 32:].data_ptr()
    assert (gate.shape, gate.stride(), up.stride()) == ((18, 32), (100, 1), (100, 1))


def test_reproducible_and_rows_independent(device):
    for arguments in (halves(9, 300, device=device), halves(9, 300, device=device)[:1]):
        check_deterministic(lambda *t: swiglu(*t, level="triton"), arguments)
        check_rows_independent(lambda *t: swiglu(*t, level="triton"), [t.requires_grad_() for t in arguments])


@pytest.mark.parametrize(
    ("columns", "expected"),
    [(14336, (1, 2048)), (3072, (2, 1024)), (6400, (8, 256)), (768, (8, 256)), (40, (32, 64)), (1, (2048, 1))],
)  # fmt: skip
def test_tiles_leave_few_lanes_without_a_column(columns, expected):
    triton_tiles = pytest.importorskip("kernel_pytorch.fused_ln_act.kernels.tiles")
    assert triton_tiles.widest_tile(columns, 2048, 4) == (*expected, 4)
    assert triton_tiles.widest_tile(columns, 2048, 4, widest=256).block == min(expected[1], 256)


@pytest.mark.parametrize("rows", [1, 65535, 65536, 131071, 2**31])
def test_more_tiles_than_one_axis_of_a_grid_counts(rows):
    triton_tiles = pytest.importorskip("kernel_pytorch.fused_ln_act.kernels.tiles")
    columns, tiles, layers = triton_tiles.widest_tile(1, 1, 1).grid(rows, 3)
    assert columns == 3
    assert max(tiles, layers) <= 65535
    assert rows <= tiles * layers < rows + layers  # hardly any without a row, which would cost as much as one that has


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: 12 GiB of bfloat16")
def test_tensor_past_2_to_the_31(device):
    packed = torch.randn(2**18 + 3, 16384, device=device, dtype=torch.bfloat16)
    y = swiglu(packed, level="triton")
    torch.testing.assert_close(y[-5:], swiglu(packed[-5:], level="reference"))


# Operators.


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
def test_opcheck(device):
    gate, up = halves(4, 3, 8, device=device)
    gate, up = gate.transpose(0, 1).requires_grad_(), up.transpose(0, 1).contiguous().requires_grad_()
    dy = torch.randn_like(gate, requires_grad=True)
    half = torch.randn(*gate.shape[:-1], 4, device=device, requires_grad=True)
    cases = [
        (operators.gated, (gate, up, "silu", 1.702, 0.7, 1.0)),
        (operators.gated, (gate, None, "gelu_tanh", 1.0, None, 0.0)),
        (operators.gated_backward, (dy, gate, up, "silu", 1.702, 0.7, 1.0, True, True)),
        (operators.gated_backward, (half.detach(), gate.detach(), None, "silu", 1.0, None, 0.0, True, False)),
    ]
    for operator, arguments in cases:
        torch.library.opcheck(operator.default, arguments)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_is_bitwise_eager(packed, device):
    own = halves(6, 40, device=device)[: 1 if packed else 2]
    check_compiled_equals_eager(lambda *t: swiglu(*t, limit=0.7, level="triton"), own, dynamic=True)


@pytest.mark.parametrize("level", ["triton", None])
def test_export(level, device):
    program = check_export(lambda *t: geglu(*t, level=level), halves(6, 40, device=device))
    if level == "triton":
        assert sum("kernel_pytorch" in str(node.target) for node in program.graph.nodes) == 1


def test_flop_counter_sees_the_operators(device):
    (packed, _) = halves(4, 16, device=device)
    with FlopCounterMode(display=False) as counter:
        reglu(packed.requires_grad_(), level="triton").sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[operators.gated] == 2 * 32
    assert counts[operators.gated_backward] == 5 * 32


def test_functional_gradients(device):
    gate, up = halves(4, 8, device=device)
    ours, theirs = (
        torch.func.grad(lambda g, u, level=level: swiglu(g, u, level=level).square().sum(), argnums=(0, 1))(gate, up)
        for level in ("triton", "reference")
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


# Modules.


def test_modules_are_the_functions(device):
    gate, up = halves(4, 8, device=device)
    oss = SwiGLU(alpha=1.702, limit=0.7, offset=1.0, level="reference")
    assert torch.equal(oss(gate, up), swiglu(gate, up, alpha=1.702, limit=0.7, offset=1.0, level="reference"))
    tanh = GEGLU("tanh", limit=0.7, level="reference")
    assert torch.equal(tanh(gate), geglu(gate, approximate="tanh", limit=0.7, level="reference"))
    assert not list(oss.parameters())
    assert repr(oss) == "SwiGLU(alpha=1.702, limit=0.7, offset=1.0, level='reference')"
    assert repr(GEGLU()) == "GEGLU(approximate='none', limit=None)"
