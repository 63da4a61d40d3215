"""The operators of the norm: under opcheck, torch.compile, export, autocast, checkpointing and the FLOP counter."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.fused_ln_act import add_layer_norm_act, layer_norm, layer_norm_act
from kernel_pytorch.harness.checks import check_compiled_equals_eager, check_export

pytestmark = pytest.mark.slow

operators = torch.ops.kernel_pytorch


def make(*shape, device, dtype=torch.float32):
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_opcheck(layout, device):
    x = make(4, 3, 8, device=device)
    if layout == "transposed":
        x = x.detach().transpose(0, 1).requires_grad_()
    half = x.detach().half().requires_grad_()
    weight, bias, seed = make(8, device=device), make(8, device=device), torch.tensor(4, device=device)
    statistics = torch.rand(2, *x.shape[:-1], device=device)
    scalars = (1e-5, 0.0, "layer", "gelu")
    needs = (True, False, True, True)
    for arguments in (
        (x, None, weight, bias, None, *scalars),
        (x, None, None, None, None, 1e-5, 0.0, "rms", "identity"),
        (x, half, weight, None, seed, 1e-5, 0.3, "layer", "silu"),
    ):
        torch.library.opcheck(operators.norm_act.default, arguments)
    for arguments in (
        (x, None, x, weight, bias, None, statistics, *scalars, "float32", "", *needs),
        (
            x,
            x,
            x,
            weight,
            bias,
            seed,
            statistics,
            1e-5,
            0.3,
            "layer",
            "gelu",
            "float32",
            "float16",
            True,
            True,
            True,
            False,
        ),
        (x, None, x, None, None, None, statistics[:1].clone(), 1e-5, 0.0, "rms", "tanh", "float32", "", *needs),
        (x, None, x, weight, None, None, statistics, *scalars, "float32", "", False, False, True, False),
    ):
        torch.library.opcheck(operators.norm_act_backward.default, arguments)


CALLS = {
    "layer_norm": (lambda x, w, b: layer_norm(x, w, b, level="triton"), [(6, 40), (40,), (40,)]),
    "add_layer_norm_act": (
        lambda x, r, w, b, seed: add_layer_norm_act(
            x, r, w, b, activation="gelu", dropout_p=0.2, seed=seed, level="triton"
        ),
        [(6, 40), (6, 40), (40,), (40,)],
    ),
}


def tensors(name, device):
    made = [make(*shape, device=device) for shape in CALLS[name][1]]
    return [*made, torch.tensor(8, device=device)] if name == "add_layer_norm_act" else made


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_is_bitwise_eager(name, dynamic, device):
    check_compiled_equals_eager(CALLS[name][0], tensors(name, device), dynamic=dynamic)


@pytest.mark.parametrize("name", CALLS)
def test_export(name, device):
    program = check_export(CALLS[name][0], [t.detach() for t in tensors(name, device)])
    nodes = [str(node.target) for node in program.graph.nodes]
    assert sum("kernel_pytorch" in target for target in nodes) == 1, nodes


def test_first_call_of_a_process_is_compiled(device):
    """Lazy imports happen inside the operator: nothing is imported while Dynamo traces; and a seed is drawn."""
    program = f"""
        import torch
        from kernel_pytorch.fused_ln_act import LayerNorm, layer_norm_act
        x = torch.randn(3, 8, device="{device}")
        f = torch.compile(lambda x: layer_norm_act(x, activation="sigmoid", dropout_p=0.5, level="triton"),
                          fullgraph=True, dynamic=True)
        y, expected = f(x), 2 * layer_norm_act(x, activation="sigmoid", level="reference")
        torch.testing.assert_close(y[y != 0], expected[y != 0])
        module = torch.compile(LayerNorm(8, device="{device}"), fullgraph=True, dynamic=True)
        torch.testing.assert_close(module(x), torch.nn.LayerNorm(8, device="{device}")(x))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


def test_autocast(device):
    """The norm runs in the dtype it is given, and the product after it in that of autocast."""
    x, weight, projection = make(4, 8, device=device), make(8, device=device), make(8, 8, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer_norm_act(x, weight, activation="gelu", level="triton")
        z = y @ projection
    assert (y.dtype, z.dtype) == (torch.float32, torch.bfloat16)
    z.float().sum().backward()
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in (x, weight, projection))


def test_calling_the_operator_differentiates(device):
    x, weight = make(4, 8, device=device), make(8, device=device)
    y = operators.norm_act(x, None, weight, None, None, 1e-5, 0.0, "layer", "gelu")[0]
    ours = torch.autograd.grad(y.sum(), (x, weight))
    theirs = torch.autograd.grad(layer_norm_act(x, weight, activation="gelu", level="reference").sum(), (x, weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_flop_counter_sees_the_operators(device):
    x, weight = make(4, 8, device=device), make(8, device=device)
    with FlopCounterMode(display=False) as counter:
        layer_norm_act(x, weight, activation="relu", level="triton").sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[operators.norm_act] == (7 + 1) * 32
    assert counts[operators.norm_act_backward] == (13 + 1) * 32


def test_selective_checkpointing_sees_the_operator(device):
    x, weight = make(4, 8, device=device), make(8, device=device)
    seen = []

    def policy(ctx, operator, *args, **kwargs):
        seen.append((operator, ctx.is_recompute))
        saved = operator is operators.norm_act.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    y = checkpoint(
        lambda x, w: layer_norm(x.sin(), w, level="triton"),
        x,
        weight,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    y.sum().backward()
    assert (operators.norm_act.default, False) in seen
    expected = torch.autograd.grad(layer_norm(x.sin(), weight, level="reference").sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


def test_functional_gradients(device):
    x, weight = make(4, 8, device=device).detach(), make(8, device=device).detach()
    ours, theirs = (
        torch.func.grad(lambda x, w, level=level: layer_norm(x, w, level=level).square().sum(), argnums=(0, 1))(
            x, weight
        )
        for level in ("triton", "reference")
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_calling_the_operator_checks_what_would_read_foreign_memory(device):
    x, scalars = make(4, 8, device=device), (1e-5, 0.0, "layer", "gelu")
    with pytest.raises(ValueError, match=r"weight: shape is \(3,\); for x of \(4, 8\) it must be its end"):
        operators.norm_act(x, None, make(3, device=device), None, None, *scalars)
    with pytest.raises(ValueError, match=r"residual: shape is \(2, 8\); it must be that of x"):
        operators.norm_act(x, x[:2], None, None, None, *scalars)
    with pytest.raises(ValueError, match="norm: given 'batch'"):
        operators.norm_act(x, None, None, None, None, 1e-5, 0.0, "batch", "gelu")
    with pytest.raises(ValueError, match="activation: given 'swish'"):
        operators.norm_act(x, None, None, None, None, 1e-5, 0.0, "layer", "swish")
    with pytest.raises(ValueError, match=r"seed: given None; with dropout_p 0\.5"):
        operators.norm_act(x, None, None, None, None, 1e-5, 0.5, "layer", "gelu")
    with pytest.raises(TypeError, match=r"x: dtype is torch\.int32"):
        operators.norm_act(x.detach().int(), None, None, None, None, *scalars)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_rows_without_columns_have_statistics_that_were_written(norm, device):
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # memory that nothing writes to holds NaN
    try:
        results = operators.norm_act(torch.empty(3, 0, device=device), None, None, None, None, 1e-5, 0.0, norm, "gelu")
    finally:
        torch.use_deterministic_algorithms(was)
    assert results[2].shape == (2 if norm == "layer" else 1, 3)
    assert not results[2].isnan().any()
