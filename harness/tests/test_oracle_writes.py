"""A function may write into what it made itself, and into nothing else."""

from __future__ import annotations

import pytest
import torch

from kernel_pytorch.harness.adversaries import packed_view
from kernel_pytorch.harness.implementation import Level, PublicLevel
from kernel_pytorch.harness.oracle import judge, run


class WriteInBackward(torch.autograd.Function):
    """Doubles; its backward does to the incoming gradient what it is told."""

    @staticmethod
    def forward(ctx, x, write):
        ctx.write = write
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        result = 2 * gradient
        ctx.write(gradient)
        return result, None


def in_place(tensor):
    tensor.detach().add_(1.0)


def through_data(tensor):
    tensor.data.add_(1.0)


def one_element_to_nan(tensor):
    tensor.data[0, 0] = float("nan")


def into_a_gap(tensor):
    tensor.data.as_strided((1,), (1,), 3).fill_(0.0)


WRITES = [in_place, through_data, one_element_to_nan, into_a_gap]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("backward", [False, True])
def test_a_written_input_is_found(write, backward):
    def function(x, weight):
        y = x + weight  # saves nothing, so autograd itself has nothing to complain of
        write(x)
        return y

    x, weight = packed_view(torch.ones(4, 3)), torch.ones(3)
    outcome = run(function, ["x", "weight"], [x, weight], [torch.ones(4, 3)] if backward else None)
    assert outcome.written == ("x",)
    assert x.eq(1.0).all(), "the caller's own tensor was written into"


@pytest.mark.parametrize("write", WRITES)
def test_a_written_incoming_gradient_is_found(write):
    incoming = packed_view(torch.ones(4, 3))
    outcome = run(lambda x: WriteInBackward.apply(x, write), ["x"], [torch.ones(4, 3)], [incoming])
    assert outcome.written == ("gradient of output 0",)
    assert incoming.eq(1.0).all(), "the caller's own gradient was written into"


def test_a_write_without_a_new_version_is_found():
    x = torch.ones(4, 3)

    def function(x):
        before = x._version
        through_data(x)
        assert x._version == before
        return x * 2

    assert run(function, ["x"], [x]).written == ("x",)


def test_what_is_written_is_a_failure_of_its_own():
    honest = run(lambda x: x * 2, ["x"], [torch.ones(4, 3)])
    writing = run(lambda x: (x * 2, in_place(x))[0], ["x"], [torch.ones(4, 3)])
    truth = run(lambda x: x * 2, ["x"], [torch.ones(4, 3).double()])
    failed = [j for j in judge(writing, honest, truth) if not j.passed]
    assert [(j.quantity, j.message) for j in failed] == [("x", "was written into")]


def test_inputs_that_overlap_themselves_can_be_copied():
    broadcast = torch.ones(1, 3).expand(4, 3)
    outcome = run(lambda x: x * 2, ["x"], [broadcast], [torch.ones(4, 3)])
    assert outcome.written == ()
    assert outcome.outputs[0].eq(2.0).all()


def append(x, cache, *, level=None):
    """A public function that writes its result into the first row of a cache too."""
    cache[0] = 2 * x
    return 2 * x


def test_what_a_public_function_is_to_write_is_a_result():
    level = PublicLevel("native", Level.NATIVE, f"{__name__}:append", written=("cache",))
    x, cache = torch.ones(3), torch.zeros(2, 3)
    outcome = run(level.load(), ["x", "cache"], [x, cache])
    assert outcome.written == ()
    assert [o.tolist() for o in outcome.outputs] == [[2.0] * 3, [[2.0] * 3, [0.0] * 3]]
    outputs = level.bound_to([x, cache])()
    assert outputs[1] is cache  # what is timed writes where users let it write
    assert cache[0].eq(2.0).all()


def test_what_else_a_public_function_writes_is_found():
    level = PublicLevel("native", Level.NATIVE, f"{__name__}:append")
    assert run(level.load(), ["x", "cache"], [torch.ones(3), torch.zeros(2, 3)]).written == ("cache",)
