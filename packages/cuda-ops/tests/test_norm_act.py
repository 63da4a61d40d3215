"""Norm, residual, dropout and activation of the library: instruction sets, dtypes, gradients, bits, bad input."""

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.cuda_ops import LIBRARY, add_layer_norm, add_rms_norm_act, layer_norm, layer_norm_act, levels
from kernel_pytorch.cuda_ops._core.philox import dropout
from kernel_pytorch.cuda_ops._fused_ln_act.activations import ACTIVATIONS, activate
from kernel_pytorch.cuda_ops.norm_act import run_norm_act
from kernel_pytorch.cuda_ops.rungs import rung
from kernel_pytorch.harness.checks import check_compiled_equals_eager, check_export

operators = torch.ops.kernel_pytorch_cuda
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EPS = 1e-5


def runs_on(device, *dtypes):
    for dtype in dtypes:
        if (reason := levels.unavailable("cuda", torch.device(device), dtype)) is not None:
            pytest.skip(reason)


def make(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def seed_on(device="cpu"):
    return torch.tensor(-1234567890123456789, device=device)


def definition(x, residual, weight, bias, seed, eps, p, norm, activation):
    """y and h of float64 tensors; h is rounded to float64 alone."""
    h = x if residual is None else residual + dropout(x, seed, p)
    z = h - h.mean(-1, keepdim=True) if norm == "layer" else h
    z = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    z = z if weight is None else z * weight
    y = activate(z if bias is None else z + bias, activation)
    return (y if residual is not None else dropout(y, seed, p)), h


def wide(tensor):
    return None if tensor is None else tensor.detach().double().requires_grad_()


def check(given, norm, activation, p, number=0):
    """Results and gradients of `(x, residual, weight, bias)` against those of plain PyTorch in float64."""
    x, residual = given[:2]
    scalars = (seed_on(x.device), EPS, p, norm, activation)
    with rung(number):
        ours = run_norm_act(*given, *scalars)[: 1 if residual is None else 2]
    h_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    assert all(t.dtype == h_dtype and t.is_contiguous() and t.shape == x.shape for t in ours)
    truths = [wide(t) for t in given]
    theirs = definition(*truths, *scalars)[: len(ours)]
    if residual is not None:  # what is normalised is h as it was rounded
        rounding = (ours[1].double() - theirs[1]).detach()
        truths[1] = (truths[1] + rounding).detach().requires_grad_()
        theirs = definition(*truths, *scalars)
    incoming = [make(*x.shape, dtype=h_dtype, device=x.device, seed=9 + i).detach() for i in range(len(ours))]
    leaves, wide_leaves = ([t for t in group if t is not None] for group in (given, truths))
    found = torch.autograd.grad(ours, leaves, incoming)
    expected = torch.autograd.grad(theirs, wide_leaves, [g.double() for g in incoming])
    tolerance = TOLERANCES[h_dtype]
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    for leaf, got, want in zip(leaves, found, expected, strict=True):
        assert got.dtype == leaf.dtype
        bound = max(tolerance, TOLERANCES[leaf.dtype])
        torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound * want.abs().max().clamp(min=1).item())


def tensors(rows, columns, dtype, device="cpu", residual=True, parameters=True):
    return (
        make(rows, columns, dtype=dtype, device=device),
        make(rows, columns, dtype=dtype, device=device, seed=1) if residual else None,
        make(columns, dtype=dtype, device=device, seed=2) if parameters else None,
        make(columns, dtype=dtype, device=device, seed=3) if parameters else None,
    )


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_and_gradients(dtype, norm, p, device):
    runs_on(device, dtype)
    for rows, columns in [(7, 33), (5, 64), (3, 3), (2, 5000), (37, 96), (1, 2048)]:
        check(tensors(rows, columns, dtype, device), norm, "identity", p)
        check(tensors(rows, columns, dtype, device, residual=False), norm, "gelu", p)
        check(tensors(rows, columns, dtype, device, parameters=False), norm, "silu", p)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, device):
    for dtype in (torch.float32, torch.bfloat16):
        runs_on(device, dtype)
        check(tensors(9, 40, dtype, device, residual=False), "layer", activation, 0.2)
        check(tensors(9, 33, dtype, device), "rms", activation, 0.0)


@pytest.mark.parametrize(("x", "residual", "weight"), list(itertools.product(DTYPES, repeat=3)))
def test_mixed_dtypes(x, residual, weight, device):
    runs_on(device, x, residual, weight)
    for columns, p in ((40, 0.0), (40, 0.3), (33, 0.3)):
        given = (make(9, columns, dtype=x, device=device), make(9, columns, dtype=residual, device=device, seed=1),
                 make(columns, dtype=weight, device=device, seed=2), make(columns, device=device, seed=3))  # fmt: skip
        check(given, "layer", "identity", p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vectors", [1030, 2060])  # of 16 bytes: beyond a block backward, and forward
def test_more_long_rows_than_clusters(dtype, vectors, device):
    """137 rows: a card has fewer clusters, which take several each."""
    runs_on(device, dtype)
    columns = vectors * 16 // dtype.itemsize
    check(tensors(137, columns, dtype, device), "layer", "identity", 0.0)
    check(tensors(137, columns, dtype, device, residual=False), "layer", "identity", 0.0)
    check(tensors(137, columns, dtype, device, residual=False), "rms", "silu", 0.2)


EVERY_ISA = """
    from test_norm_act import *
    for dtype in DTYPES:
        for columns in (1, 16, 33, 257, 5000):
            for p in (0.0, 0.4):
                check(tensors(7, columns, dtype), "rms" if columns == 1 else "layer", "gelu", p)
                check(tensors(18, columns, dtype, residual=False), "rms", "identity", p)
"""


@pytest.mark.parametrize("instruction_set", LIBRARY.instruction_sets[:-1])  # on the best run all the others
def test_every_instruction_set_is_right(instruction_set, run_on):
    run_on(instruction_set, EVERY_ISA)


def test_a_wrong_gradient_is_found(monkeypatch):
    right = run_norm_act
    monkeypatch.setitem(check.__globals__, "run_norm_act", lambda x, *rest: right(x * 1.01 - 0.01 * x.detach(), *rest))
    with pytest.raises(AssertionError, match="not close"):
        check(tensors(5, 33, torch.float32, residual=False), "layer", "identity", 0.0)


@pytest.mark.parametrize("columns", [64, 768, 5001])
def test_a_large_mean_costs_no_digits(columns, device):
    """Numbers around ten thousand: squares would lose all that makes them differ."""
    runs_on(device, torch.float32)
    x = (1e4 + torch.arange(6 * columns, dtype=torch.float64) % 17 / 16).reshape(6, columns).to(device)
    y = layer_norm(x.float(), None, None, EPS)
    torch.testing.assert_close(y.double(), F.layer_norm(x, (columns,), eps=EPS), rtol=2e-3, atol=2e-3)


def test_rows_of_infinity_and_nan_are_nan(device):
    runs_on(device, torch.float32)
    x = torch.randn(4, 40, device=device)
    x[1, 3], x[2, 39] = float("inf"), float("nan")
    assert layer_norm(x, None, None, EPS).isnan().any(-1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("needs", [n for n in itertools.product([False, True], repeat=4) if any(n)])
def test_gradients_in_every_combination(needs, p):
    whole = tensors(5, 9, torch.float32)
    scalars = (seed_on(), EPS, p, "layer", "gelu")
    own = [t.detach().requires_grad_(need) for t, need in zip(whole, needs, strict=True)]
    wanted = [t for t in own if t.requires_grad]
    for used in (slice(0, 1), slice(1, 2), slice(0, 2)):  # y alone, h alone, both
        ours, full = (run_norm_act(*given, *scalars)[used] for given in (own, whole))
        pairs = [(o, f) for o, f in zip(ours, full, strict=True) if o.requires_grad]
        if not pairs:
            continue
        found = torch.autograd.grad([o.square().sum() for o, _ in pairs], wanted, allow_unused=True)
        expected = torch.autograd.grad([f.square().sum() for _, f in pairs], whole, allow_unused=True)
        expected = [g for g, need in zip(expected, needs, strict=True) if need]
        for a, b in zip(found, expected, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def test_only_what_is_needed_is_allocated():
    x, residual, weight, bias = (t.detach() for t in tensors(4, 9, torch.float32))
    _, h, statistics = operators.norm_act(x, residual, weight, bias, None, EPS, 0.0, "layer", "gelu")
    assert h.shape == x.shape
    assert statistics.shape == (2, 4)
    assert operators.norm_act(x, None, None, None, None, EPS, 0.0, "rms", "gelu")[1].shape == (0,)
    scalars = (EPS, 0.0, "layer", "gelu", "float32", "float32")
    for needs in itertools.product([False, True], repeat=4):
        found = operators.norm_act_backward(x, None, h, weight, bias, None, statistics, *scalars, *needs)
        assert [t.numel() > 0 for t in found] == list(needs)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize(("norm", "activation"), [("layer", "gelu_tanh"), ("rms", "silu"), ("layer", "identity")])
def test_derivatives(norm, activation, p):
    scalars = (seed_on(), EPS, p, norm, activation)
    for residual in (True, False):
        given = tensors(3, 7, torch.float64, residual=residual)
        inputs = [t for t in given if t is not None]

        def function(*own, residual=residual):
            placed = own if residual else (own[0], None, *own[1:])
            return run_norm_act(*placed, *scalars)[: 2 if residual else 1]

        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


BITS = """
    import torch
    from kernel_pytorch.cuda_ops import add_layer_norm_act
    torch.manual_seed(0)
    given = [torch.randn(*shape, requires_grad=True) for shape in ((700, 1100), (700, 1100), (1100,), (1100,))]
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        y, h = add_layer_norm_act(*given, 1e-5, "gelu", 0.1, torch.tensor(5))
        found.append((y, h, *torch.autograd.grad((y, h), given, (torch.ones_like(y), torch.ones_like(y)))))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
"""


def test_the_number_of_threads_changes_no_bit(run_on):
    run_on(LIBRARY.instruction_sets[-1], BITS)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (1, 1), (3, 2, 5, 17)])
def test_any_shape(shape):
    x, weight, bias = make(*shape), make(shape[-1], seed=1), make(shape[-1], seed=2)
    y, h = add_layer_norm(x, x.detach(), weight, bias, EPS)
    torch.testing.assert_close(y, F.layer_norm(h, shape[-1:], weight, bias, EPS))
    dx, dweight, dbias = torch.autograd.grad(y.sum(), (x, weight, bias))
    assert dx.shape == x.shape
    assert dweight.shape == dbias.shape == shape[-1:]
    torch.testing.assert_close(dbias, torch.full_like(bias, x.numel() // shape[-1]))


def test_layouts():
    x, parameters = torch.randn(9, 6, 40).transpose(0, 1), torch.randn(2, 80)[:, ::2]
    torch.testing.assert_close(layer_norm(x, *parameters), F.layer_norm(x, (40,), *parameters))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
def test_opcheck(device):
    runs_on(device, torch.float32)
    x, residual, weight, bias = tensors(6, 8, torch.float32, device)
    seed, statistics, rms = seed_on(device), torch.rand(2, 6, device=device), torch.rand(1, 6, device=device)
    for arguments in [
        (x, residual, weight, bias, seed, EPS, 0.25, "layer", "gelu"),
        (x.transpose(0, 1), None, None, None, None, EPS, 0.0, "rms", "identity"),
        (x, residual.detach().bfloat16(), weight, None, None, EPS, 0.0, "rms", "silu"),
    ]:
        torch.library.opcheck(operators.norm_act.default, arguments)
    for arguments in [
        (x, x, x, weight, bias, seed, statistics, EPS, 0.2, "layer", "gelu", "float32", "float32", *[True] * 4),
        (x, None, x, weight, None, None, rms, EPS, 0.0, "rms", "silu", "float32", "", True, False, True, False),
        (x, None, x, None, bias, None, rms, EPS, 0.0, "rms", "tanh", "bfloat16", "float16", True, True, False, True),
        (x, None, x, None, None, None, rms, EPS, 0.0, "rms", "identity", "float32", "float32", False, True, True, True),
    ]:  # fmt: skip
        torch.library.opcheck(operators.norm_act_backward.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic, device):
    runs_on(device, torch.float32)
    seed = seed_on(device)
    given = list(tensors(6, 40, torch.float32, device))
    check_compiled_equals_eager(lambda *t: add_layer_norm(*t, EPS, 0.1, seed), given, dynamic=dynamic)


def test_export(device):
    runs_on(device, torch.float32)
    x, residual, weight, _ = (t.detach() for t in tensors(6, 40, torch.float32, device))
    program = check_export(lambda *t: add_rms_norm_act(*t, EPS, "silu"), [x, residual, weight])
    assert sum("kernel_pytorch_cuda" in str(node.target) for node in program.graph.nodes) == 1


@pytest.mark.slow
def test_first_call_of_a_process_is_compiled(run_python):
    run_python("""
        import torch
        from kernel_pytorch.cuda_ops import layer_norm
        x = torch.randn(3, 8)
        f = torch.compile(layer_norm, fullgraph=True, dynamic=True)
        torch.testing.assert_close(f(x), torch.nn.functional.layer_norm(x, (8,)))
    """)


def test_flop_counter(device):
    runs_on(device, torch.float32)
    x, _, weight, bias = tensors(4, 8, torch.float32, device)
    with FlopCounterMode(display=False) as counter:
        layer_norm_act(x, weight, bias, EPS, "gelu").sum().backward()
    counts = {operators.norm_act: (7 + 5 + 1) * 32, operators.norm_act_backward: (13 + 9 + 1) * 32}
    assert counter.get_flop_counts()["Global"] == counts


X, SEED = torch.ones(4, 8), torch.tensor(1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: layer_norm(X, torch.ones(3)),
            r"layer_norm: weight: shape is \(3,\); for x of shape \(4, 8\) it must be",
        ),
        (lambda: layer_norm(X, None, torch.ones(1, 8)), r"layer_norm: bias: shape is \(1, 8\)"),
        (lambda: layer_norm(X.int()), "x: dtype is torch.int32; allowed are float16"),
        (lambda: layer_norm(X[0, 0]), r"x: shape is \(\); it needs at least one dimension"),
        (lambda: layer_norm(X[:, :0]), r"x: shape is \(4, 0\); the last dimension must not be empty"),
        (lambda: layer_norm(X, torch.ones(8, dtype=torch.bool)), "weight: dtype is torch.bool"),
        (lambda: add_layer_norm(X, X[:3]), r"residual: shape is \(3, 8\); it must be that of x, \(4, 8\)"),
        (lambda: add_layer_norm(X, X, dropout_p=1.5, seed=SEED), "dropout_p: given 1.5; it must be at least 0"),
        (lambda: add_layer_norm(X, X, dropout_p=0.5), "seed: given None; with dropout_p 0.5"),
        (lambda: add_layer_norm(X, X, dropout_p=0.5, seed=SEED.float()), "it must be an int64 tensor of shape"),
        (lambda: layer_norm_act(X, None, None, EPS, "mish"), "activation: given 'mish'; allowed are 'gelu'"),
        (
            lambda: operators.norm_act(X, None, None, None, None, EPS, 0.0, "batch", "gelu"),
            "norm: given 'batch'; allowed are 'layer', 'rms'",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dy": X[:2]}, r"norm_act_backward: dy: shape is \(2, 8\); it must be that of h, \(4, 8\)"),
        ({"dh": X[:2]}, r"dh: shape is \(2, 8\)"),
        ({"statistics": torch.ones(1, 4)}, r"statistics: shape is \(1, 4\); it needs 8 numbers"),
        ({"statistics": torch.ones(2, 4).double()}, "statistics: dtype is not the one that h is computed in"),
        ({"weight": torch.ones(3)}, r"weight: shape is \(3,\)"),
        ({"x_dtype": "int8"}, "x_dtype: given 'int8'; allowed are 'float16'"),
        (
            {"x_dtype": "float16"},
            "x_dtype: given 'float16', and residual_dtype ''; promoted they must be the dtype of h",
        ),
        ({"residual_dtype": "half"}, "residual_dtype: given 'half'; allowed are 'float16'"),
    ],
)
@pytest.mark.cpu_backend
def test_bad_input_of_the_backward(changed, message):
    given = {
        "dy": X, "dh": None, "h": X, "weight": None, "bias": None, "seed": None, "statistics": torch.ones(2, 4),
        "eps": EPS, "dropout_p": 0.0, "norm": "layer", "activation": "gelu", "x_dtype": "float32",
        "residual_dtype": "", "need_dx": True, "need_dresidual": False, "need_dweight": False, "need_dbias": False,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=message):
        operators.norm_act_backward(*(given | changed).values())


def test_functional_gradients():
    x, weight = torch.randn(4, 8), torch.randn(8)
    ours = torch.func.grad(lambda x, w: layer_norm(x, w).square().sum(), argnums=(0, 1))(x, weight)
    theirs = torch.func.grad(lambda x, w: F.layer_norm(x, (8,), w).square().sum(), argnums=(0, 1))(x, weight)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("columns", [64, 768, 1600, 4096, 8192])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_rung_on_cuda(number, columns, dtype):
    runs_on("cuda", dtype)
    for norm, activation, p in (("layer", "identity", 0.0), ("rms", "gelu", 0.2)):
        check(tensors(37, columns, dtype, "cuda"), norm, activation, p, number)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("columns", [64, 768, 1600, 2048])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_rung_of_the_backward_on_cuda(columns, dtype):
    runs_on("cuda", dtype)
    x, residual, weight, bias = (t.detach() for t in tensors(1031, columns, dtype, "cuda"))
    scalars = (EPS, 0.2, "layer", "gelu")
    _, h, statistics = operators.norm_act(x, residual, weight, bias, seed_on("cuda"), *scalars)
    arguments = (x, residual, h, weight, bias, seed_on("cuda"), statistics, *scalars)
    name = str(dtype).removeprefix("torch.")
    found = []
    for number in (2, 3):
        with rung(number):
            found.append(operators.norm_act_backward(*arguments, name, name, *[True] * 4))
    for a, b in zip(*found, strict=True):
        bound = TOLERANCES[dtype]
        torch.testing.assert_close(a, b, rtol=bound, atol=bound * max(1.0, b.abs().max().item()))
