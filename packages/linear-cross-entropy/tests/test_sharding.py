"""Sharding: two processes compute what one does in float64, and send nothing that they need not."""

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from kernel_pytorch.harness.support import Processes
from kernel_pytorch.linear_cross_entropy import (
    LinearCrossEntropy,
    cross_entropy,
    linear_cross_entropy,
    operators,
)
from kernel_pytorch.linear_cross_entropy._core.sharding import shard
from kernel_pytorch.linear_cross_entropy.levels import LADDER

DEVICE = torch.device("cuda" if torch.cuda.device_count() > 1 else "cpu")
RUNS = [operators.check_target, *(run for level in operators.LEVELS.values() for run in level)]
RULES = [(run.operator, run.sharding) for run in RUNS]
WHY_NO_TRITON = LADDER.unavailable("triton", DEVICE, torch.float32)
LEVELS = [
    "native",
    pytest.param("triton", marks=pytest.mark.skipif(WHY_NO_TRITON is not None, reason=str(WHY_NO_TRITON))),
]
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0}

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two processes share a CPU or have a GPU each")


@pytest.fixture(scope="module")
def processes():
    """Started once for all tests of this file."""
    with Processes(timeout=300.0, device_type=DEVICE.type) as two:
        yield two


# What runs in both processes.


def placement(text):
    from torch.distributed.tensor import Replicate, Shard

    word, _, dimension = text.partition(" ")
    return Shard(int(dimension)) if word == "shard" else Replicate()


def placed(tensor):
    (found,) = tensor.placements
    return f"shard {found.dim}" if found.is_shard() else "partial" if found.is_partial() else "replicate"


def numbers(tokens=(5, 7)):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(*tokens, 8), torch.randn(30, 8), torch.randn(30)
    target = torch.randint(30, tokens)
    target[0, ::2] = -100
    return hidden, weight, target, bias


def sharded(mesh, level, tokens, vocabulary, reduction, shape=(5, 7), options=OPTIONS):
    """Hold DTensors against one process in float64: where results were placed, messages sent for them."""
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    hidden, weight, target, bias = (t.to(mesh.device_type) for t in numbers(shape))
    exact = [t.double().requires_grad_() for t in (hidden, weight, bias)]
    loss = linear_cross_entropy(
        exact[0], exact[1], target, bias=exact[2], reduction=reduction, **options, level="reference"
    )
    expected = [loss, *torch.autograd.grad(loss.sum(), exact)]

    def distribute(tensor, where):
        return distribute_tensor(tensor, mesh, [placement(where)], src_data_rank=None)

    own = distribute(hidden, tokens), distribute(weight, vocabulary), distribute(bias, vocabulary)
    own, target = [t.requires_grad_() for t in own], distribute(target, tokens)
    with CommDebugMode() as messages:
        loss = linear_cross_entropy(own[0], own[1], target, bias=own[2], reduction=reduction, **options, level=level)
        found = [loss, *torch.autograd.grad(loss.sum(), own)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.full_tensor().double(), b, rtol=1e-5, atol=1e-5)
    return SimpleNamespace(results=[placed(t) for t in found], messages=messages.get_total_counts())


def sharded_logits(mesh, level, tokens):
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    hidden, weight, target, _ = (t.to(mesh.device_type) for t in numbers())
    logits = hidden @ weight.T
    exact = logits.double().requires_grad_()
    expected = cross_entropy(exact, target, reduction="none", **OPTIONS, level="reference")
    expected = [expected, *torch.autograd.grad(expected.sum(), exact)]
    own = distribute_tensor(logits, mesh, [placement(tokens)], src_data_rank=None).requires_grad_()
    target = distribute_tensor(target, mesh, [placement(tokens)], src_data_rank=None)
    with CommDebugMode() as messages:
        loss = cross_entropy(own, target, reduction="none", **OPTIONS, inplace=True, level=level)
        found = [loss, *torch.autograd.grad(loss.sum(), own)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.full_tensor().double(), b, rtol=1e-5, atol=1e-5)
    return SimpleNamespace(results=[placed(t) for t in found], messages=messages.get_total_counts())


# The functions.


@pytest.mark.parametrize("tokens", ["shard 0", "shard 1", "replicate"])
@pytest.mark.parametrize("level", LEVELS)
def test_tokens_are_sharded_over_any_dimension(processes, level, tokens):
    """Five and seven over two processes: their shares are not of one size."""
    for found in processes.call(sharded, level, tokens, "replicate", "none"):
        total = "replicate" if tokens == "replicate" else "partial"
        assert found.results == [tokens, tokens, total, total]
        assert found.messages == 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_mean_over_all_processes(processes, level):
    for found in processes.call(sharded, level, "shard 0", "replicate", "mean"):
        assert found.results[1] == "shard 0"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tokens", ["shard 0", "shard 1", "replicate"])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_are_computed_with_the_loss(processes, level, tokens, reduction):
    for found in processes.call(sharded, level, tokens, "replicate", reduction, (5, 7), {"softcap": 3.0}):
        assert found.results[1] == tokens
        if tokens == "replicate":
            assert found.messages == 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_sharded_over_the_vocabulary_is_gathered(processes, level):
    for found in processes.call(sharded, level, "replicate", "shard 0", "none"):
        assert found.messages > 0


@pytest.mark.parametrize("tokens", ["shard 0", "shard 1"])
def test_logits_are_sharded_over_tokens(processes, tokens):
    for level in ["native", *(["triton"] if WHY_NO_TRITON is None else [])]:
        for found in processes.call(sharded_logits, level, tokens):
            assert found.results == [tokens, tokens]
            assert found.messages == 0


def checked_target(mesh):
    """A wrong target is told of in the process that has it."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    hidden, weight, target, _ = numbers()
    target[4, 0] = 99
    options = {"reduction": "none"}  # a mean would wait for the process that has raised
    own = distribute_tensor(hidden, mesh, [Shard(0)], src_data_rank=None)
    weight = distribute_tensor(weight, mesh, [Replicate()], src_data_rank=None)
    try:
        linear_cross_entropy(own, weight, distribute_tensor(target, mesh, [Shard(0)], src_data_rank=None), **options)
    except IndexError as error:
        return str(error)
    return ""


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU targets are not looked at")
def test_targets_are_checked_where_they_are(processes):
    first, second = processes.call(checked_target)
    assert first == ""
    assert second.startswith("target: 99 at position (1, 0)")


# A wrong rule.


def register(placements):
    """What is done once `torch.distributed.tensor` is imported."""
    for operator, rule in RULES:
        shard(placements, operator, rule)


def sharded_by_a_wrong_rule(mesh):
    """The gradient of the weight is said to be whole where it is only a part: planted, and taken back."""
    import torch.distributed.tensor as tensor

    wrong = SimpleNamespace(
        DTensor=tensor.DTensor, Shard=tensor.Shard, Replicate=tensor.Replicate, Partial=tensor.Replicate
    )
    register(wrong)
    try:
        # No other test makes DTensor remember this shape.
        sharded(mesh, "native", "shard 0", "replicate", "none", (10, 3))
    except AssertionError as error:
        return str(error)
    finally:
        register(tensor)
    return ""


def test_a_wrong_rule_would_be_found(processes):
    for error in processes.call(sharded_by_a_wrong_rule):
        assert "not close" in error


# The module.


def fully_sharded(mesh, level):
    """A vocabulary of 29 words over two processes, each with a batch of its own; FSDP averages, one process adds."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    exact = LinearCrossEntropy(8, 29, reduction="sum", level="reference")
    ours = LinearCrossEntropy(8, 29, reduction="sum", level=level)
    ours.load_state_dict(exact.state_dict())
    ours, exact = ours.to(mesh.device_type), exact.double().to(mesh.device_type)
    fully_shard(ours, mesh=mesh)
    hidden, target = torch.randn(6, 8, device=mesh.device_type), torch.randint(29, (6,), device=mesh.device_type)
    rank = mesh.get_local_rank()
    ours(hidden.chunk(2)[rank], target.chunk(2)[rank]).backward()
    exact(hidden.double(), target).backward()
    whole = ours.weight.grad.full_tensor() * 2
    torch.testing.assert_close(whole.double(), exact.weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_the_module_under_fsdp(processes, level):
    processes.call(fully_sharded, level)


# Registration.


@pytest.mark.parametrize("first", ["kernel_pytorch.linear_cross_entropy", "torch.distributed.tensor"])
def test_rules_are_registered_whatever_is_imported_first(first):
    program = f"""
        import sys
        import {first}
        import kernel_pytorch.linear_cross_entropy
        assert ("torch.distributed.tensor" in sys.modules) == ({first!r} == "torch.distributed.tensor")
        from torch.distributed.tensor import DTensor
        import torch
        known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
        for space in (torch.ops.kernel_pytorch, torch.ops.kernel_pytorch_native):
            for name in ("linear_cross_entropy", "linear_cross_entropy_with_gradients", "cross_entropy"):
                assert getattr(space, name).default in known, (space, name)
        assert torch.ops.kernel_pytorch.check_target.default in known
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


def test_a_torch_without_a_place_for_rules_is_told_of():
    with pytest.warns(UserWarning, match=r"kernel_pytorch.* will not accept DTensors.*no attribute '_op_dispatcher'"):
        register(SimpleNamespace(DTensor=object()))
