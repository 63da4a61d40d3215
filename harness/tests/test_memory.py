"""Bytes that a call needs, on functions whose need is known."""

import gc

import torch

from kernel_pytorch.harness.memory import peak, profile_memory

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


def test_what_an_earlier_measurement_left_in_a_cycle_does_not_lower_the_peak(device):
    def leaves_a_cycle():
        cycle = [torch.ones(MIB // 4, device=device)]
        cycle.append(cycle)

    def needs_a_mebibyte():
        if calls.pop():
            gc.collect()  # as may happen at any time
        return torch.ones(MIB // 4, device=device)

    calls = [True, False]
    peak(leaves_a_cycle, device)
    assert peak(needs_a_mebibyte, device) == MIB
