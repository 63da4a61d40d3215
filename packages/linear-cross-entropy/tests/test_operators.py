"""The registered operators, beyond what the support table asks of every level: layouts, bits, counts, bad input."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.harness.checks import check_compiled_equals_eager, check_export
from kernel_pytorch.linear_cross_entropy import LinearCrossEntropy, cross_entropy, linear_cross_entropy

SPACES = {"native": torch.ops.kernel_pytorch_native, "triton": torch.ops.kernel_pytorch}
SCALARS = (-100, 0.1, 1e-2, 2.0)
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 2.0}


def make(device, dtype=torch.float32, tokens=(2, 3), depth=8, words=21):
    torch.manual_seed(0)
    hidden = torch.randn(*tokens, depth, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(words, depth, device=device, dtype=dtype, requires_grad=True)
    bias = torch.randn(words, device=device, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(words, tokens, device=device), bias


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
@pytest.mark.slow
@pytest.mark.parametrize("level", ["native", "triton"])
def test_opcheck(level, device):
    hidden, weight, target, bias = make(device)
    operators = SPACES[level]
    losses = [torch.rand(target.shape, device=device) for _ in range(2)]
    logits = torch.randn(*target.shape, 21, device=device, requires_grad=True)
    cases = [
        (operators.linear_cross_entropy, (hidden, weight, target, bias, *SCALARS, 0)),
        (operators.linear_cross_entropy, (hidden, weight, target.int(), None, -100, 0.0, 0.0, 0.0, 4)),
        (
            operators.linear_cross_entropy_backward,
            (*losses, hidden, weight, target, bias, *SCALARS, 0, True, True, True),
        ),
        (
            operators.linear_cross_entropy_backward,
            (*losses, hidden, weight, target, None, *SCALARS, 0, False, True, False),
        ),
        (operators.cross_entropy, (logits, target, *SCALARS)),
        (operators.cross_entropy_backward, (*losses, logits, target, *SCALARS)),
        (torch.ops.kernel_pytorch.check_target, (target, 21, -100)),
    ]
    for operator, arguments in cases:
        torch.library.opcheck(operator.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("level", ["native", "triton"])
def test_compiled_is_bitwise_eager(level, dynamic, device):
    def function(hidden, weight, target, bias):
        return linear_cross_entropy(hidden, weight, target, bias=bias, reduction="none", **OPTIONS, level=level)

    check_compiled_equals_eager(function, make(device), dynamic=dynamic)


@pytest.mark.parametrize("level", [None, "triton"])
def test_export(level, device):
    hidden, weight, target, bias = (t.detach() for t in make(device))
    program = check_export(
        lambda h, w, t, b: linear_cross_entropy(h, w, t, bias=b, **OPTIONS, level=level), [hidden, weight, target, bias]
    )
    nodes = [str(node.target) for node in program.graph.nodes if "kernel_pytorch" in str(node.target)]
    checked = ["kernel_pytorch.check_target.default"] if device.type == "cpu" else []
    space = "kernel_pytorch_native" if level is None else "kernel_pytorch"
    assert nodes == [*checked, f"{space}.linear_cross_entropy.default"]


class Model(torch.nn.Module):
    """A language model, as small as they get."""

    def __init__(self, words, features, level):
        super().__init__()
        self.embedding = torch.nn.Embedding(words, features)
        self.block = torch.nn.Linear(features, features)
        self.head = LinearCrossEntropy(features, words, softcap=5.0, level=level)

    def forward(self, tokens):
        hidden = torch.nn.functional.silu(self.block(self.embedding(tokens)))
        return self.head(hidden[:, :-1], tokens[:, 1:])


@pytest.mark.parametrize("level", ["native", "triton", "reference"])
def test_a_training_step_compiles_without_a_graph_break(level, device):
    torch.manual_seed(0)
    tokens = torch.randint(50, (3, 9), device=device)
    model = Model(50, 16, level).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    initial = {name: value.clone() for name, value in model.state_dict().items()}

    def train(step):
        model.load_state_dict(initial)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = step(tokens)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]

    torch._dynamo.utils.counters.clear()
    compiled = train(torch.compile(model, fullgraph=True, backend="aot_eager"))
    assert not torch._dynamo.utils.counters["graph_break"]
    for ours, theirs in zip(compiled, train(model), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.slow
def test_first_call_of_a_process_is_compiled(device):
    """Lazy imports happen inside the operator: nothing is imported while Dynamo traces."""
    program = f"""
        import torch
        from kernel_pytorch.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy
        hidden, weight = torch.randn(3, 8, device="{device}"), torch.randn(9, 8, device="{device}")
        target = torch.ones(3, dtype=torch.int64, device="{device}")
        f = torch.compile(lambda *a: linear_cross_entropy(*a, level="triton"), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(f(hidden, weight, target), linear_cross_entropy(hidden, weight, target))
        module = LinearCrossEntropy(8, 9, device="{device}")
        compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
        torch.testing.assert_close(compiled(hidden, target), module(hidden, target))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


@pytest.mark.parametrize("level", ["native", "triton"])
def test_calling_the_operator_differentiates(level, device):
    hidden, weight, target, bias = make(device)
    operators = SPACES[level]
    loss = operators.linear_cross_entropy(hidden, weight, target, bias, *SCALARS, 0)[0].sum()
    expected = linear_cross_entropy(hidden, weight, target, bias=bias, reduction="sum", **OPTIONS, level="reference")
    found, right = (torch.autograd.grad(y, (hidden, weight, bias)) for y in (loss, expected))
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)
    logits = torch.randn(*target.shape, 21, device=device, requires_grad=True)
    loss = operators.cross_entropy(logits, target, *SCALARS)[0].sum()
    expected = cross_entropy(logits, target, reduction="sum", **OPTIONS, level="reference")
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits))


@pytest.mark.parametrize("level", ["native", "triton"])
def test_flop_counter_sees_the_operators(level, device):
    hidden, weight, target, _ = make(device)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(hidden, weight, target, level=level).backward()
    counts, operators = counter.get_flop_counts()["Global"], SPACES[level]
    logits, product = 6 * 21, 2 * 6 * 21 * 8
    assert counts[operators.linear_cross_entropy_with_gradients] == 3 * product + 9 * logits
    assert operators.linear_cross_entropy_backward not in counts
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(hidden.detach(), weight, target, level=level).backward()
    assert (
        counter.get_flop_counts()["Global"][operators.linear_cross_entropy_with_gradients] == 2 * product + 9 * logits
    )
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(hidden, weight, target, reduction="none", level=level).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[operators.linear_cross_entropy] == product + 4 * logits
    assert counts[operators.linear_cross_entropy_backward] == 3 * product + 5 * logits


@pytest.mark.parametrize("first", ["kernel_pytorch.linear_cross_entropy", "torch.utils.flop_counter"])
def test_flop_formulas_are_registered_whatever_is_imported_first(first):
    program = f"""
        import {first}
        import kernel_pytorch.linear_cross_entropy
        import torch.utils.flop_counter
        for space in (torch.ops.kernel_pytorch, torch.ops.kernel_pytorch_native):
            assert space.linear_cross_entropy in torch.utils.flop_counter.flop_registry
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


@pytest.mark.parametrize("level", ["native", "triton"])
def test_calling_the_operator_checks_what_would_read_foreign_memory(level, device):
    hidden, weight, target, bias = (t.detach() for t in make(device))

    def call(hidden=hidden, weight=weight, target=target, bias=bias):
        return SPACES[level].linear_cross_entropy(hidden, weight, target, bias, *SCALARS, 0)

    with pytest.raises(ValueError, match=r"target: shape is \(3,\); it must be \(2, 3\)"):
        call(target=target[0])
    with pytest.raises(TypeError, match=r"target: dtype is torch\.float32"):
        call(target=target.float())
    with pytest.raises(ValueError, match=r"weight: shape is \(21, 7\)"):
        call(weight=weight[:, :7])
    with pytest.raises(TypeError, match=r"weight: dtype is torch\.float64"):
        call(weight=weight.double())
    with pytest.raises(ValueError, match=r"bias: shape is \(20,\)"):
        call(bias=bias[:20])
    with pytest.raises(TypeError, match=r"dtype is torch\.int32"):
        call(hidden=hidden.int())


@pytest.mark.parametrize("level", ["native", "triton"])
def test_functional_gradients(level, device):
    hidden, weight, target, _ = (t.detach() for t in make(device))
    ours, theirs = (
        torch.func.grad(lambda h, w, name=name: linear_cross_entropy(h, w, target, level=name), argnums=(0, 1))(
            hidden, weight
        )
        for name in (level, "reference")
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
