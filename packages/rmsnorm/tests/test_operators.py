"""The registered operators, beyond what the support table asks of every level: layouts, bits, counts, bad input."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.harness.checks import check_compiled_equals_eager, check_export
from kernel_pytorch.rmsnorm import add_rms_norm, head_rms_norm, rms_norm

operators = torch.ops.kernel_pytorch


def make(*shape, device, dtype=torch.float32):
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_opcheck(dtype, layout, device):
    x = make(4, 3, 8, device=device, dtype=dtype)
    if layout == "transposed":
        x = x.detach().transpose(0, 1).requires_grad_()
    weight = make(8, device=device, dtype=dtype)
    rstd = torch.rand(x.shape[:-1], device=device)
    cases = [
        (operators.rms_norm, (x, weight, 1e-6, 0.0, "llama")),
        (operators.rms_norm, (x, None, 1e-6, 0.0, "gemma")),
        (operators.rms_norm, (x, make(x.shape[-2], 8, device=device), 1e-6, 1.0, "none")),
        (operators.add_rms_norm, (x, x.detach().flip(0).requires_grad_(), weight, 1e-6, 0.0, "llama")),
        (operators.add_rms_norm, (x, x.detach().float().requires_grad_(), weight, 1e-6, 0.0, "gemma")),
        (operators.rms_norm_backward, (x, None, x, weight, rstd, 1e-6, 0.0, True, True)),
        (operators.rms_norm_backward, (x, x, x, weight, rstd, 1e-6, 0.0, True, False)),
        (operators.rms_norm_backward, (x, None, x, weight, rstd, 1e-6, 0.0, False, True)),
        (operators.rms_norm_backward, (x, None, x, None, rstd, 1e-6, 0.0, True, True)),
    ]
    for operator, arguments in cases:
        if operator is operators.rms_norm_backward and dtype == torch.float16:
            continue  # its own gradients meet in float16, in another order under AOTAutograd than in eager
        torch.library.opcheck(operator.default, arguments)


CALLS = {
    "rms_norm": (lambda x, w: rms_norm(x, w, level="triton"), [(6, 40), (40,)]),
    "add_rms_norm": (lambda x, r, w: add_rms_norm(x, r, w, level="triton"), [(6, 40), (6, 40), (40,)]),
    "head_rms_norm": (lambda x, w: head_rms_norm(x, w, level="triton"), [(6, 3, 16), (3, 16)]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_is_bitwise_eager(name, dynamic, device):
    function, shapes = CALLS[name]
    check_compiled_equals_eager(function, [make(*s, device=device) for s in shapes], dynamic=dynamic)


@pytest.mark.parametrize("level", ["triton", None])
@pytest.mark.parametrize("name", CALLS)
def test_export(name, level, device):
    shapes = CALLS[name][1]
    function = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "head_rms_norm": head_rms_norm}[name]
    program = check_export(lambda *t: function(*t, level=level), [make(*s, device=device).detach() for s in shapes])
    if level == "triton":
        nodes = [str(node.target) for node in program.graph.nodes]
        assert sum("kernel_pytorch" in target for target in nodes) == 1, nodes


def test_first_call_of_a_process_is_compiled(device):
    """Lazy imports happen inside the operator: nothing is imported while Dynamo traces."""
    program = f"""
        import torch
        from kernel_pytorch.rmsnorm import RMSNorm, rms_norm
        x = torch.randn(3, 8, device="{device}")
        f = torch.compile(lambda x: rms_norm(x, level="triton"), fullgraph=True, dynamic=True)
        torch.testing.assert_close(f(x), rms_norm(x, level="reference"))
        module = torch.compile(RMSNorm(8, device="{device}"), fullgraph=True, dynamic=True)
        torch.testing.assert_close(module(x), torch.nn.RMSNorm(8, device="{device}")(x))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


def test_calling_the_operator_differentiates(device):
    x, weight = make(4, 8, device=device), make(8, device=device)
    ours = torch.autograd.grad(operators.rms_norm(x, weight, 1e-6, 0.0, "llama")[0].sum(), (x, weight))
    theirs = torch.autograd.grad(rms_norm(x, weight, level="reference").sum(), (x, weight))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_flop_counter_sees_the_operators(device):
    x, weight = make(4, 8, device=device), make(8, device=device)
    with FlopCounterMode(display=False) as counter:
        rms_norm(x, weight, level="triton").sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[operators.rms_norm] == 4 * 32
    assert counts[operators.rms_norm_backward] == 11 * 32


@pytest.mark.parametrize("first", ["kernel_pytorch.rmsnorm", "torch.utils.flop_counter"])
def test_flop_formulas_are_registered_whatever_is_imported_first(first):
    program = f"""
        import {first}
        import kernel_pytorch.rmsnorm
        import torch.utils.flop_counter
        assert torch.ops.kernel_pytorch.rms_norm in torch.utils.flop_counter.flop_registry
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


def test_calling_the_operator_checks_what_would_read_foreign_memory(device):
    x = make(4, 8, device=device)
    with pytest.raises(ValueError, match=r"weight: shape is \(3,\); it must be the end of that of x, \(4, 8\)"):
        operators.rms_norm(x, make(3, device=device), 1e-6, 0.0, "llama")
    with pytest.raises(ValueError, match="casting: given 'lama'"):
        operators.rms_norm(x, None, 1e-6, 0.0, "lama")
    with pytest.raises(TypeError, match=r"x: dtype is torch\.int32"):
        operators.rms_norm(x.detach().int(), None, 1e-6, 0.0, "llama")


def test_functional_gradients(device):
    x, weight = make(4, 8, device=device).detach(), make(8, device=device).detach()
    ours, theirs = (
        torch.func.grad(lambda x, w, level=level: rms_norm(x, w, level=level).square().sum(), argnums=(0, 1))(x, weight)
        for level in ("triton", "reference")
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
