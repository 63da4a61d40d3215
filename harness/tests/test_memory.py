"""Bytes that a call needs, on functions whose need is known."""

import torch

from kernel_pytorch.harness.memory import profile_memory

MIB = 2**20


def doubled(x):
    return x * 2


def through_a_temporary(x):
    return (x + 1).sin()


class _SavesTwice(torch.autograd.Function):
    """Keeps a copy of its input although the input itself would do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        return x.square()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * x * dy


def near(value, expected):
    """Up to the few bytes that the profiler sees of scalars."""
    return abs(value - expected) < 4096


def test_output_alone(device):
    x = torch.ones(MIB // 4, device=device)
    use = profile_memory(doubled, x)
    assert near(use.forward_peak, MIB)
    assert use.saved_for_backward == 0


def test_a_temporary_lives_until_the_output_is_there(device):
    use = profile_memory(through_a_temporary, torch.ones(MIB // 4, device=device))
    assert near(use.forward_peak, 2 * MIB)
    assert near(use.saved_for_backward, MIB)  # sin needs its input for the backward
    assert use.training_peak >= 3 * MIB


def test_arguments_and_outputs_do_not_count_as_saved(device):
    x = torch.ones(MIB // 4, device=device)
    assert profile_memory(torch.square, x).saved_for_backward == 0
    assert profile_memory(torch.exp, x).saved_for_backward == 0
    assert near(profile_memory(_SavesTwice.apply, x).saved_for_backward, MIB)
