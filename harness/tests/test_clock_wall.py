"""Wall-clock times of steps and launches, on a clock that moves by what the calls say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernel_pytorch.harness.clock import wall
from kernel_pytorch.harness.clock.wall import host_seconds, step_seconds

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")


@pytest.fixture
def made_up(monkeypatch):
    """A device that works while the host goes on: `call(host, device)` makes a call of that many seconds on each."""
    state = SimpleNamespace(now=0.0, busy_until=0.0, order=[])

    def synchronize(device):
        state.now = max(state.now, state.busy_until)

    def call(name, host, device):
        def run():
            state.order.append(name)
            state.now += host
            state.busy_until = max(state.now, state.busy_until) + device

        return run

    monkeypatch.setattr(wall.time, "perf_counter", lambda: state.now)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    state.call = call
    return state


def test_a_step_lasts_until_the_device_is_done(made_up):
    found = step_seconds({"short": made_up.call("short", 0.001, 0.25), "long": made_up.call("long", 0.5, 0.0)}, CUDA, 8)
    times, returned = found["short"]
    assert times == pytest.approx([0.251] * 8)
    assert returned == pytest.approx([0.001] * 8)
    assert [*found["long"][0], *found["long"][1]] == pytest.approx([0.5] * 16)


@pytest.mark.parametrize(("seconds", "calls"), [(0.004, 5), (0.0001, 20), (0.1, 1)])
def test_short_steps_are_repeated(made_up, seconds, calls):
    rounds = 8
    times, _ = step_seconds({"step": made_up.call("step", seconds, 0.0)}, CPU, rounds)["step"]
    assert times == pytest.approx([seconds] * rounds)
    assert len(made_up.order) == 3 + 1 + rounds * calls  # warm-up, one to count by, samples


def test_steps_take_turns_in_a_changing_order(made_up):
    step_seconds({name: made_up.call(name, 1.0, 0.0) for name in "abc"}, CPU, 20)
    rounds = [
        "".join(made_up.order[start : start + 3]) for start in range(len(made_up.order) - 60, len(made_up.order), 3)
    ]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 3


def test_launches_do_not_wait_for_the_device(made_up):
    calls = {"fast": made_up.call("fast", 2e-6, 1e-3), "slow": made_up.call("slow", 5e-6, 0.0)}
    assert host_seconds(calls, CUDA) == pytest.approx({"fast": 2e-6, "slow": 5e-6})
    assert len(made_up.order) == 2 * (3 + wall.ROUNDS * wall.LAUNCHES)
