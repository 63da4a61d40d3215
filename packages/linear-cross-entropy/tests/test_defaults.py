"""The default level, held against committed measurements of functions and models."""

from pathlib import Path

import pytest
import torch

from kernel_pytorch.harness.models.record import FILE as MODELS
from kernel_pytorch.harness.models.record import load as load_models
from kernel_pytorch.harness.models.works import find_work
from kernel_pytorch.harness.results import CaseRecord, load
from kernel_pytorch.linear_cross_entropy import cross_entropy
from kernel_pytorch.linear_cross_entropy._core import cuda_level, levels
from kernel_pytorch.linear_cross_entropy.levels import LADDER
from kernel_pytorch.linear_cross_entropy.technique import technique

BY_MODELS = {"linear_cross_entropy"}
"""Whose default rests on whole models: its own benchmarks are of the time before gradients came with the loss."""
FILES = sorted((Path(__file__).parents[3] / "results").glob("*/linear-cross-entropy.json"))


def test_the_twin_is_a_default_only_where_it_was_measured(monkeypatch):
    measured = {
        (m.operation, getattr(torch, m.case.dtype))
        for file in FILES
        if load(file).machine.environment.device_type == "cpu"
        for m in load(file).measurements
        if m.implementation == "cuda" and m.status == "measured"
    }
    rows = [row for row in LADDER.defaults if row.level == "cuda"]
    assert rows
    for row in rows:
        assert row.device == "cpu"
        assert {(function, dtype) for function in row.functions for dtype in row.dtypes} <= measured


def test_every_default_rests_on_a_record_and_is_of_functions_that_there_are():
    for row in LADDER.defaults:
        assert set(row.functions) <= set(LADDER.functions) == {operation.name for operation in technique.operations}
        if FILES:
            assert row.record in [file.parent.name for file in FILES]


def test_on_a_cpu_a_loss_of_logits_is_its_twins(monkeypatch):
    """Where that is installed, of plain tensors; what transforms of torch.func meet has rules for them."""
    logits, target = torch.randn(4, 33).bfloat16().requires_grad_(), torch.tensor([0, 5, -100, 32])
    cpu = torch.device("cpu")
    if LADDER.unavailable("cuda", cpu, torch.bfloat16) is not None:
        pytest.skip("needs kernel-pytorch-cuda-ops")
    twin = cross_entropy(logits, target, level="cuda")
    assert torch.equal(cross_entropy(logits, target), twin)
    assert cross_entropy(logits, target).grad_fn.name() == twin.grad_fn.name()
    assert LADDER.default("cross_entropy", cpu, torch.float16) == "native"  # not measured
    assert LADDER.default("linear_cross_entropy", cpu, torch.bfloat16) == "native"
    assert LADDER.default("cross_entropy", torch.device("meta"), torch.bfloat16) == "native"
    by_row = torch.func.vmap(lambda row, word: cross_entropy(row, word, reduction="none", level="reference"))
    for name in ("is_transformed", "has_transform"):  # the second says that nothing remembered may be taken
        monkeypatch.setattr(levels, name, lambda: True)
    assert torch.equal(cross_entropy(logits, target), cross_entropy(logits, target, level="native"))
    assert by_row(logits.detach(), target).shape == (4,)
    monkeypatch.setattr(cuda_level, "cuda_ops", None)
    assert LADDER.default("cross_entropy", cpu, torch.bfloat16) == "native"


def lacked_memory(m):
    """Whether the reference's logits left no memory for the others of its group: nothing is known of these then."""
    return m.status == "crashed" and "OutOfMemoryError" in (m.reason or "")


def not_measured(operation, capability):
    """What of an operation's benchmarks no device of a compute capability has measured Triton's kernels in."""
    wanted = ".".join(map(str, capability))
    measured = {
        (m.case.label, m.direction)
        for file in FILES
        if load(file).machine.environment.compute_capability == wanted
        for m in load(file).measurements
        if (m.operation, m.implementation) == (operation.name, "triton")
        if m.status == "measured" or lacked_memory(m)
    }
    grid = operation.bench_grid.cases("cuda")
    return {(CaseRecord.of(case).label, d.value) for case in grid for d in operation.directions} - measured


@pytest.mark.skipif(not FILES, reason="not a checkout")
@pytest.mark.parametrize("operation", technique.operations, ids=lambda operation: operation.name)
def test_triton_is_the_default_only_where_all_benchmarks_were_measured(operation):
    for row in LADDER.defaults:
        if row.level == "triton" and operation.name in row.functions and operation.name not in BY_MODELS:
            assert not any(not_measured(operation, capability) for capability in row.capabilities)
    assert not_measured(operation, (8, 0))  # nobody had such a card


@pytest.mark.skipif(not FILES, reason="not a checkout")
def test_no_model_is_slower_by_the_default_of_linear_cross_entropy():
    """And each gives what stock gives: the record is that of `kernel-pytorch models`."""
    for row in LADDER.defaults:
        if not BY_MODELS & set(row.functions):
            continue
        runs = load_models(FILES[0].parents[1] / row.record / MODELS).runs.values()
        rows = [r for run in runs if "linear-cross-entropy" in run.packages for r in run.rows if r.variant == "ours"]
        rows = [r for r in rows if find_work(r.work).training]  # elsewhere there is no loss
        assert {"llama", "qwen3"} <= {r.model for r in rows}
        for r in rows:
            assert r.ratio.median >= 1.0  # its interval may reach below: that is no verdict
            assert r.cost.difference < 0.05
