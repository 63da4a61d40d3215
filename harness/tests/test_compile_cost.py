"""Seconds of a first call and host time of every call."""

import pytest
import torch

from kernel_pytorch.harness import compile_cost
from kernel_pytorch.harness.compile_cost import host_time

CPU = torch.device("cpu")

SLOW_FIRST = """
import time
from toy import *
from toy import native as healthy

def slow_at_first(x, *rest):
    if not hasattr(slow_at_first, "called"):
        slow_at_first.called = True
        time.sleep(0.4)
    return healthy(x, *rest)

import dataclasses
operation = technique.operations[0]
operation = dataclasses.replace(operation, levels=[operation.implementations[0],
    Implementation("slow", Level.NATIVE, "starting:slow_at_first"),
    Implementation("dead", Level.CUDA, "starting:nothing")])
technique = dataclasses.replace(technique, name="starting", operations=[operation])
"""


@pytest.mark.slow
def test_first_call_is_told_from_the_others(site):
    site.install_toy()
    site.install("starting", {"kernel_pytorch.techniques": {"starting": "starting:technique"}}, starting=SLOW_FIRST)
    import starting

    case = starting.operation.bench_grid.cases()[0]
    cost = compile_cost.compile_cost("starting", "gate", "slow", case, CPU)
    assert cost.failure == ""
    assert min(cost.cold, cost.warm) > 0.3
    cost = compile_cost.compile_cost("starting", "gate", "dead", case, CPU)
    assert (cost.cold, cost.warm) == (None, None)
    assert "AttributeError" in cost.failure


def test_host_time(toy):
    found = host_time(toy.gate, "native", toy.gate.bench_grid.cases()[0], CPU)
    assert found.eager > 0.0
    assert found.compiled is not None
    assert found.graph is None
