"""Overheads of a call: what can be measured here is, and the other figures say why they are missing."""

import pytest
import torch

from kernel_pytorch.harness.overheads import FIGURES, STARTS, Call
from kernel_pytorch.harness.page import markdown
from kernel_pytorch.harness.report import cost_rows, missing_costs
from kernel_pytorch.harness.results import Results

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


def cost_of(toy, level):
    call = call_of(toy, level)
    return call.with_starts(call.cost())


def call_of(toy, level):
    return Call(toy.technique, toy.gate, toy.gate.implementation(level), toy.gate.bench_grid.cases()[0], CPU)


@pytest.mark.slow
def test_a_level_that_runs(toy):
    cost = cost_of(toy, "native")
    assert cost.eager > 0.0
    assert cost.forward_peak >= 8 * 64 * 4  # at least its output
    assert cost.training_peak >= cost.forward_peak
    assert cost.missing["graph"] == "no CUDA"
    assert cost.missing["launches"] == "no CUDA"
    assert cost.missing["cold_start"] == "nothing is compiled at the first call"
    told = {name for name in FIGURES if getattr(cost, name) is not None}
    assert told | set(cost.missing) == set(FIGURES)
    assert not told & set(cost.missing)


def test_a_level_that_cannot_run_says_why_for_every_figure(toy):
    cost = cost_of(toy, "cuda")
    assert cost.missing == dict.fromkeys(FIGURES, "the toy has no kernel")


@pytest.mark.slow
def test_a_level_that_compiles_is_started_in_a_process_of_its_own(site, toy, monkeypatch):
    site.install_toy()
    cost = cost_of(toy, "compile")
    assert all(getattr(cost, name) >= 0.0 for name in STARTS), cost.missing


def test_the_report_shows_figures_and_reasons(toy, machine):
    about = {"technique": "toy", "created": "2026-01-01", "quick": False, "machine": machine}
    found = Results(**about, measurements=(), costs=(cost_of(toy, "native"), cost_of(toy, "cuda")))
    native, cuda = cost_rows(found)
    assert native[:2] == ["gate", "native"]
    assert native[2].endswith("µs")
    assert native[4] == "-"  # no CUDA graph
    assert cuda[2:] == ["-"] * 9
    assert any(line.startswith("cuda: ") and line.endswith("the toy has no kernel") for line in missing_costs(found))
    assert "**Whole cost of a call**:" in markdown(found)


def test_the_number_of_the_run_is_no_figure_that_is_missing(toy):
    assert "run" not in cost_of(toy, "cuda").missing


@pytest.mark.slow
def test_first_call_is_told_from_the_others(site):
    site.install_toy()
    site.install("starting", {"kernel_pytorch.techniques": {"starting": "starting:technique"}}, starting=SLOW_FIRST)
    import starting

    case = starting.operation.bench_grid.cases()[0]
    seconds, failure = Call.named("starting", "gate", "slow", case, CPU).first_calls()
    assert failure == ""
    assert min(seconds[name] for name in STARTS) > 0.3
    seconds, failure = Call.named("starting", "gate", "dead", case, CPU).first_calls()
    assert seconds == {}
    assert "AttributeError" in failure


def test_host_time(toy):
    found = call_of(toy, "native").host_time()
    assert min(found.values()) > 0.0
    assert set(found) == {"eager", "compiled"}
