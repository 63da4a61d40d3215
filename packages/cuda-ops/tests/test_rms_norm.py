"""RMSNorm of the library: instruction sets, dtypes, gradients, bits, bad input. Verification is rmsnorm's."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.cuda_ops import LIBRARY, add_rms_norm, head_rms_norm, rms_norm
from kernel_pytorch.harness.checks import check_compiled_equals_eager, check_export

operators = torch.ops.kernel_pytorch_cuda
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def make(*shape, device, dtype=torch.float32):
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)


def definition(x, weight, eps=1e-6, offset=0.0):
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd if weight is None else x * rstd * (offset + weight)


AGAINST_FLOAT64 = """
    import torch
    from kernel_pytorch.cuda_ops import add_rms_norm
    torch.manual_seed(0)
    bounds = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-6, torch.float64: 4e-15}
    for dtype, bound in bounds.items():
        for columns in (1, 5, 16, 33, 257, 5000):
            x, residual = torch.randn(2, 7, columns, dtype=dtype).unbind(0)
            weight, dy, dh = torch.randn(columns, dtype=dtype), torch.randn(7, columns), torch.randn(7, columns)
            own = [t.requires_grad_() for t in (x, residual, weight)]
            wide = [t.detach().double().requires_grad_() for t in own]
            y, h = add_rms_norm(*own, offset=0.5)
            truth_h = (wide[0] + wide[1]).to(dtype).double() + (wide[0] + wide[1]) * 0  # rounded as h is
            truth_h = (wide[0] + wide[1]) + (truth_h - wide[0] - wide[1]).detach()
            truth = truth_h * torch.rsqrt(truth_h.square().mean(-1, keepdim=True) + 1e-6) * (0.5 + wide[2])
            ours = torch.autograd.grad((y, h), own, (dy.to(dtype), dh.to(dtype)))
            theirs = torch.autograd.grad((truth, truth_h), wide, (dy.to(dtype).double(), dh.to(dtype).double()))
            for a, b in zip((y, h, *ours), (truth, truth_h, *theirs)):
                scale = b.abs().max().clamp(min=1)
                assert ((a.double() - b).abs().max() / scale).item() < bound, (dtype, columns)
"""


@pytest.mark.cpu_backend
@pytest.mark.parametrize("instruction_set", LIBRARY.instruction_sets)
def test_every_instruction_set_is_right(instruction_set, run_on):
    run_on(instruction_set, AGAINST_FLOAT64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vectors", [1030, 4100])  # of 16 bytes: beyond a block backward, and forward
def test_more_long_rows_than_clusters(dtype, vectors, device):
    """137 rows: a card has fewer clusters, which take several each."""
    columns = vectors * 16 // dtype.itemsize
    x, residual, weight = (make(*shape, device=device, dtype=dtype) for shape in [(137, columns)] * 2 + [(columns,)])
    dy, dh = torch.randn(2, 137, columns, device=device, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, residual)]
    bound = 4e-6 if dtype == torch.float32 else 1.6e-2
    for own, of in (((x, weight), wide[:2]), ((x, weight, residual), wide)):
        if len(own) == 2:
            ours, theirs = (rms_norm(*own),), (definition(*of),)
        else:
            ours = add_rms_norm(x, residual, weight)
            h = of[0] + of[2]
            h = h + (h.to(dtype).double() - h).detach()  # rounded as ours is
            theirs = (definition(h, of[1]), h)
        gradients = (dy, dh)[: len(ours)]
        ours += torch.autograd.grad(ours, own, gradients)
        theirs += torch.autograd.grad(theirs, of, [g.double() for g in gradients])
        for a, b in zip(ours, theirs, strict=True):
            assert ((a.double() - b).abs().amax() / b.abs().amax()).item() < bound


LONG_ROWS = """
    import torch
    from torch.nn import functional as F
    from kernel_pytorch.cuda_ops import layer_norm, rms_norm, softmax
    for columns in (65600, 264000):
        x = torch.randn(2, columns, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).requires_grad_()
        wide = x.detach().double().requires_grad_()
        pairs = [
            (rms_norm(x, None), F.rms_norm(wide, (columns,), eps=1e-6)),
            (layer_norm(x, None, None, 1e-6), F.layer_norm(wide, (columns,), eps=1e-6)),
            (softmax(x), wide.softmax(-1)),
        ]
        dy = torch.randn_like(x)
        for ours, truth in pairs:
            dx, = torch.autograd.grad(ours, x, dy)
            expected, = torch.autograd.grad(truth, wide, dy.double())
            for a, b in ((ours, truth), (dx, expected)):
                assert ((a.double() - b).abs().amax() / b.abs().amax()).item() < 1e-2, columns
"""


@pytest.mark.skipif(LIBRARY.instruction_sets != ("CUDA, emulated",), reason="of the kernels of other cards")
@pytest.mark.parametrize("capability", ["80", "90", "120"])
def test_cards_without_clusters_or_with_less_shared_memory_take_long_rows(capability, run_python):
    run_python(LONG_ROWS, KERNEL_PYTORCH_EMULATED_CAPABILITY=capability)


ROUNDS = """
    import torch
    INFINITE = float("inf")
    SPECIAL = [65519.996, 65520.0, 65504.0, 5.9e-8, 2.9e-8, 2.98e-8, 0.0, -0.0, INFINITE, -INFINITE, INFINITE * 0]
    from kernel_pytorch.cuda_ops import rms_norm
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        # A row of one number is its sign; of a number and zeros beside a huge eps it keeps its digits.
        x = bits.view(dtype)
        y = rms_norm(x.reshape(-1, 1), torch.ones(1, dtype=torch.float32), eps=1.0, casting="llama")
        truth = x.double() / torch.sqrt(x.double() ** 2 + 1)
        assert torch.equal(y.isnan().squeeze(), truth.isnan() | x.isinf())
        finite = x.abs() < 1e18  # of bfloat16, beyond which squares leave float32, here as in the definition
        assert torch.allclose(y.squeeze()[finite].double(), truth[finite], rtol=3e-7, atol=0), dtype
        # A row of ones is its own norm, so y is the weight, rounded.
        weight = torch.cat([torch.randn(2**16) * torch.logspace(-44, 38, 2**16), torch.tensor(SPECIAL)])
        ones = torch.ones(1, weight.numel(), dtype=dtype)
        y = rms_norm(ones, weight, eps=0.0, casting="gemma")[0]
        assert y.dtype == dtype
        assert torch.equal(y.isnan(), weight.isnan())
        assert torch.equal(y[~y.isnan()], weight.to(dtype)[~y.isnan()])
"""


@pytest.mark.cpu_backend
@pytest.mark.parametrize("instruction_set", LIBRARY.instruction_sets)
def test_every_half_precision_number_is_read(instruction_set, run_on):
    run_on(instruction_set, ROUNDS)


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_mixed_dtypes(x_dtype, weight_dtype, casting):
    x, weight = torch.randn(6, 21, dtype=x_dtype), torch.randn(21, dtype=weight_dtype)
    own = [x.requires_grad_(), weight.requires_grad_()]
    y = rms_norm(*own, casting=casting)
    assert y.dtype == (x_dtype if casting == "gemma" else torch.promote_types(x_dtype, weight_dtype))
    gradients = torch.autograd.grad(y.sum(), own)
    assert [g.dtype for g in gradients] == [x_dtype, weight_dtype]
    truth = definition(x.detach().double(), weight.detach().double())
    bound = 2 * max(torch.finfo(dtype).eps for dtype in (x_dtype, y.dtype, torch.float32 if casting else y.dtype))
    torch.testing.assert_close(y.double(), truth, rtol=bound, atol=bound)


@pytest.mark.parametrize("needs", [n for n in itertools.product([False, True], repeat=3) if any(n)])
def test_gradients_in_every_combination(needs):
    tensors = [torch.randn(5, 9), torch.randn(5, 9), torch.randn(9)]
    own = [t.clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    theirs = [t.double().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
    y, h = add_rms_norm(*own)
    truth_h = theirs[0] + theirs[1]
    truth = definition(truth_h, theirs[2])
    wanted, true = ([t for t in group if t.requires_grad] for group in (own, theirs))
    for outputs, truths in (((y,), (truth,)), ((y, h), (truth, truth_h))):
        pairs = [(o, t) for o, t in zip(outputs, truths, strict=True) if t.requires_grad]
        ones = [torch.ones_like(o) for o, _ in pairs]
        found = torch.autograd.grad([o for o, _ in pairs], wanted, ones, retain_graph=True)
        expected = torch.autograd.grad([t for _, t in pairs], true, [o.double() for o in ones], retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


def test_second_derivatives():
    x, weight = make(3, 7, device="cpu", dtype=torch.float64), make(7, device="cpu", dtype=torch.float64)
    residual = make(3, 7, device="cpu", dtype=torch.float64)
    torch.autograd.gradgradcheck(lambda x, w: rms_norm(x, w, offset=1.0), (x, weight))
    torch.autograd.gradgradcheck(lambda x, r, w: add_rms_norm(x, r, w), (x, residual, weight))


BITS = """
    import torch
    from kernel_pytorch.cuda_ops import rms_norm
    torch.manual_seed(0)
    x, weight = torch.randn(700, 4100, requires_grad=True), torch.randn(4100, requires_grad=True)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        y = rms_norm(x, weight)
        found.append((y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
"""


def test_the_number_of_threads_changes_no_bit(run_on):
    run_on(LIBRARY.instruction_sets[-1], BITS)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (1, 1), (3, 2, 5, 17)])
def test_any_shape(shape):
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    y = rms_norm(x, weight)
    torch.testing.assert_close(y, definition(x, weight))
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert dx.shape == x.shape
    torch.testing.assert_close(dweight, torch.autograd.grad(definition(x, weight).sum(), weight)[0])


def test_layouts():
    x = torch.randn(9, 6, 40).transpose(0, 1)
    weight = torch.randn(80)[::2]
    torch.testing.assert_close(rms_norm(x, weight), definition(x, weight))
    heads = torch.randn(5, 3, 16)[:, :, ::2].requires_grad_()
    per_head = torch.randn(3, 8, requires_grad=True)
    y = head_rms_norm(heads, per_head)
    torch.testing.assert_close(y, definition(heads, per_head))
    for ours, theirs in zip(
        torch.autograd.grad(y.sum(), (heads, per_head)),
        torch.autograd.grad(definition(heads, per_head).sum(), (heads, per_head)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
def test_opcheck(device):
    x, weight, heads = make(4, 3, 8, device=device), make(8, device=device), make(3, 8, device=device)
    rstd = torch.rand(4, 3, device=device)
    for operator, arguments in [
        (operators.rms_norm, (x, weight, 1e-6, 0.0, "llama")),
        (operators.rms_norm, (x.transpose(0, 1), None, 1e-6, 0.0, "gemma")),
        (operators.rms_norm, (x, heads, 1e-6, 1.0, "none")),
        (operators.add_rms_norm, (x, x.detach().flip(0).requires_grad_(), weight, 1e-6, 0.0, "llama")),
        (operators.rms_norm_backward, (x, None, x, weight, rstd, 1e-6, 0.0, True, True)),
        (operators.rms_norm_backward, (x, x, x, None, rstd, 1e-6, 0.0, True, False)),
        (operators.rms_norm_backward, (x, None, x, weight, rstd, 1e-6, 0.0, False, True)),
    ]:
        torch.library.opcheck(operator.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic, device):
    tensors = [make(6, 40, device=device), make(6, 40, device=device), make(40, device=device)]
    check_compiled_equals_eager(add_rms_norm, tensors, dynamic=dynamic)


def test_export(device):
    program = check_export(rms_norm, [make(6, 40, device=device).detach(), make(40, device=device).detach()])
    assert sum("kernel_pytorch_cuda" in str(node.target) for node in program.graph.nodes) == 1


@pytest.mark.slow
def test_first_call_of_a_process_is_compiled(run_python):
    run_python("""
        import torch
        from kernel_pytorch.cuda_ops import rms_norm
        x = torch.randn(3, 8)
        f = torch.compile(rms_norm, fullgraph=True, dynamic=True)
        torch.testing.assert_close(f(x), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))
    """)


def test_flop_counter(device):
    x = make(4, 8, device=device)
    with FlopCounterMode(display=False) as counter:
        rms_norm(x).sum().backward()
    assert counter.get_flop_counts()["Global"] == {operators.rms_norm: 4 * 32, operators.rms_norm_backward: 11 * 32}


def test_bad_input_is_named():
    x, weight = torch.randn(4, 8), torch.randn(8)
    for message, arguments in {
        r"rms_norm: weight: shape is \(3,\); it must be the end of that of x, \(4, 8\)": (
            x,
            torch.randn(3),
            1e-6,
            0.0,
            "llama",
        ),
        "rms_norm: casting: given 'lama'; allowed are": (x, weight, 1e-6, 0.0, "lama"),
        "x: dtype is torch.int32; allowed are float16": (x.int(), weight, 1e-6, 0.0, "llama"),
        r"x: shape is \(\); it needs at least one dimension": (x[0, 0], None, 1e-6, 0.0, "llama"),
        r"x: shape is \(4, 0\); the last dimension must not be empty": (x[:, :0], None, 1e-6, 0.0, "llama"),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            operators.rms_norm(*arguments)
    with pytest.raises(RuntimeError, match=r"add_rms_norm: residual: shape is \(3, 8\)"):
        add_rms_norm(x, x[:3], weight)
    with pytest.raises(RuntimeError, match=r"rms_norm_backward: dy: shape is \(2, 8\)"):
        operators.rms_norm_backward(x[:2], None, x, weight, torch.rand(4), 1e-6, 0.0, True, True)
    with pytest.raises(RuntimeError, match=r"rms_norm_backward: rstd: shape is \(3,\)"):
        operators.rms_norm_backward(x, None, x, weight, torch.rand(3), 1e-6, 0.0, True, True)


def test_functional_gradients():
    x, weight = torch.randn(4, 8), torch.randn(8)
    ours = torch.func.grad(lambda x, w: rms_norm(x, w).square().sum(), argnums=(0, 1))(x, weight)
    theirs = torch.func.grad(lambda x, w: definition(x, w).square().sum(), argnums=(0, 1))(x, weight)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
