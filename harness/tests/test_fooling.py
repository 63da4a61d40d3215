"""Implementations that try to look better than they are, one trick each: the harness refuses or exposes every one."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from kernel_pytorch.harness import timing
from kernel_pytorch.harness.clock.statistics import FEWEST_ROUNDS
from kernel_pytorch.harness.launches import is_counted
from kernel_pytorch.harness.machine import BandwidthPoint
from kernel_pytorch.harness.report import best_pytorch, cells
from kernel_pytorch.harness.technique import Cost, Direction, Implementation, Level
from kernel_pytorch.harness.trials import trials
from kernel_pytorch.harness.verification import verify_trial
from kernel_pytorch.harness.workload import Workload, jobs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch):
    """Few input sets: the times themselves are not looked at."""
    monkeypatch.setattr(timing, "sets_needed", lambda *arguments, **options: 3)


@pytest.fixture
def measured(toy, machine):
    """Plant a function as the toy's native level, and give the measurements of the first case by level."""

    def measure(planted=None, direction=Direction.FORWARD, on=machine, wanted=None):
        toy.native = planted or toy.native
        found = timing.run_job(
            jobs(toy.technique, CPU, directions=(direction,))[0], on, CPU, wanted, rounds=FEWEST_ROUNDS
        )
        return {m.implementation: m for m in found}

    return measure


def assert_refused(found, reason):
    native = found["native"]
    assert native.status == "wrong", native
    assert native.reason.startswith(reason), native.reason
    assert native.samples == ()
    assert "native" not in found["reference"].comparisons
    assert found["reference"].status == "measured"


def memory(tensor):
    return tensor.data_ptr(), tensor._version


@pytest.mark.parametrize("key", [memory, lambda x: (tuple(x.shape), x.dtype)], ids=["by memory", "by shape"])
def test_a_cached_output_for_a_repeated_input(toy, measured, key):
    reference, cache = toy.reference, {}

    def caching(x, weight, factor):
        if torch.is_grad_enabled() or key(x) not in cache:
            cache[key(x)] = reference(x, weight, factor)
        return cache[key(x)]

    found = measured(caching)
    fresh = "after timing, on fresh inputs: output is off by"
    # Fresh inputs may lie where others were; then they give it away, before the inputs in place are changed.
    places = (
        ("the timed call, after its inputs changed in place: output is off by", fresh) if key is memory else (fresh,)
    )
    assert_refused(found, places)


@pytest.mark.parametrize("direction", [Direction.BACKWARD, Direction.BOTH])
def test_cached_gradients_for_a_repeated_graph(toy, measured, direction):
    reference, cache = toy.reference, {}

    class Caching(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, factor):
            ctx.save_for_backward(x, weight)
            ctx.factor = factor
            return reference(x, weight, factor)

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            key = (memory(x), memory(dy))
            if key not in cache:
                with torch.enable_grad():
                    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
                    cache[key] = torch.autograd.grad(reference(*leaves, ctx.factor), leaves, dy)
                # Held, so that the memory is not given to the check's own tensors.
                cache[key] += (x, dy)
            return (*cache[key][:2], None)

    found = measured(Caching.apply, direction)
    assert_refused(found, "the timed call, after its inputs changed in place: gradient of x is off by")


@pytest.mark.parametrize("direction", Direction)
def test_work_skipped_after_the_first_calls(toy, measured, direction):
    reference, calls = toy.reference, []

    def skipping(x, weight, factor):
        calls.append(x)
        return reference(x, weight, factor if len(calls) < 5 else 1.01 * factor)

    assert_refused(measured(skipping, direction), "after timing, on fresh inputs: output is off by")


def test_an_output_that_is_never_filled_again(toy, measured):
    reference, buffer = toy.reference, []

    def stale(x, weight, factor):
        buffer.append(reference(x, weight, factor))
        return buffer[0]

    assert_refused(measured(stale), "after timing, on fresh inputs: output is off by")


def test_right_on_the_timed_input_only(toy, measured):
    reference = toy.reference
    job = jobs(toy.technique, CPU, directions=(Direction.FORWARD,))[0]
    checked = timing.expect(job.operation, timing.Trial(job.case, timing.RANDOM), CPU).arguments[0]
    timed = [arguments[0].clone() for arguments in Workload.of(job, 3, torch.Generator().manual_seed(0)).arguments]

    def knowing(x, weight, factor):
        known = any(torch.equal(x, each) for each in (checked, *timed))
        return reference(x, weight, factor) if known else torch.zeros_like(x)

    assert_refused(measured(knowing), "after timing, on fresh inputs: output is off by")


def test_an_input_that_is_written(toy, measured):
    native = toy.native

    def writing(x, weight, factor):
        y = native(x, weight, factor)
        x.data.mul_(2.0)
        return y

    found = measured(writing)
    assert found["native"].status == "wrong"
    assert found["native"].reason == "x was written into"


def test_faster_than_the_memory_that_its_working_set_fits_in(toy, measured, machine):
    small = BandwidthPoint(bytes=2**20, bytes_per_second=1e12, peak_bytes_per_second=1e12, memory="cache")
    large = BandwidthPoint(bytes=2**30, bytes_per_second=1.0, peak_bytes_per_second=1.0, memory="DRAM")
    ceilings = machine.ceilings.model_copy(update={"bandwidth": (small, large)})
    in_cache = measured(on=machine.model_copy(update={"ceilings": ceilings}))
    assert in_cache["native"].status == "measured", "beyond DRAM, but its 12 KiB stay in the cache"

    slow = small.model_copy(update={"bytes_per_second": 1e3, "peak_bytes_per_second": 1e3})
    ceilings = machine.ceilings.model_copy(update={"bandwidth": (slow, large)})
    beyond = measured(on=machine.model_copy(update={"ceilings": ceilings}))
    assert beyond["native"].status == "rejected"
    assert "times the fastest stream measured on this machine" in beyond["native"].reason


@pytest.fixture
def compiled(toy, machine):
    """Plant a function as the toy's `compile` level, and give its measurement."""

    def measure(planted, jobs_to_run=1):
        toy.compiled = planted
        found = [
            timing.run_job(job, machine, CPU, {"reference", "compile"}, rounds=FEWEST_ROUNDS)[-1]
            for job in jobs(toy.technique, CPU, directions=(Direction.FORWARD,))[:jobs_to_run]
        ]
        return found[-1]

    return measure


@pytest.mark.parametrize("trick", [
    lambda function: lambda x, weight, factor: function(x, weight, factor),
    lambda function: torch.compile(function, backend="eager", fullgraph=True),
], ids=["never compiled", "a backend that runs what it gets"])  # fmt: skip
def test_eager_under_the_name_of_compile(toy, compiled, trick):
    found = compiled(trick(toy.reference))
    assert found.status == "wrong"
    assert found.reason == "is not compiled: no graph reached a compiler and the call ran eagerly"


def test_half_of_it_compiled(toy, compiled):
    def broken(x, weight, factor):
        y = x * weight
        torch._dynamo.graph_break()
        return torch.sigmoid(y) * factor

    found = compiled(torch.compile(broken, backend="aot_eager"))
    assert found.status == "wrong"
    assert found.reason.startswith("is not compiled as a whole, graph breaks:")


@pytest.mark.parametrize("fullgraph", [False, True])
def test_nine_shapes_without_a_reset(toy, compiled, monkeypatch, fullgraph):
    planted = torch.compile(toy.reference, backend="aot_eager", fullgraph=fullgraph, dynamic=False)
    for rows in range(1, 9):
        planted(torch.zeros(rows, 64), torch.zeros(64), 1.5)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: None)
    found = compiled(planted)
    assert found.status == "wrong"
    assert "recompile" in found.reason.lower()
    monkeypatch.undo()


def test_every_job_begins_with_a_reset(toy, compiled):
    planted = torch.compile(toy.reference, backend="aot_eager", dynamic=False)
    for rows in range(1, 9):
        planted(torch.zeros(rows, 64), torch.zeros(64), 1.5)
    assert compiled(planted, jobs_to_run=3).status == "measured"


def test_a_baseline_that_nobody_would_use(toy, measured):
    native = toy.native
    found = measured(lambda *arguments: (time.sleep(2e-3), native(*arguments))[1])
    group = list(found.values())
    best = best_pytorch(group)
    assert best != "native"
    row = cells(found[best], best)
    assert found[best].comparisons["native"].speedup.median > 10.0, "a claim over native alone would be true"
    assert row[-2] == "is it", "and the table says beside it that this is PyTorch itself"
    slow = cells(found["native"], best)
    assert float(slow[-2].split("x")[0]) < 0.1


triton = pytest.importorskip("triton", reason="counts launches of Triton kernels")
tl = triton.language


@triton.jit
def multiply(x, weight, y, columns, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    product = tl.load(x + tl.program_id(0) * columns + place, place < columns) * tl.load(
        weight + place, place < columns
    )
    tl.store(y + tl.program_id(0) * columns + place, product, place < columns)


@triton.jit
def gate(y, factor, columns, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    product = tl.load(y + tl.program_id(0) * columns + place, place < columns)
    tl.store(y + tl.program_id(0) * columns + place, tl.sigmoid(product) * factor, place < columns)


class Pair(torch.autograd.Function):
    """The gate as two kernels, forward only in Triton."""

    @staticmethod
    def forward(ctx, x, weight, factor):
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        y = torch.empty_like(x)
        multiply[(x.shape[0],)](x, weight, y, x.shape[1], BLOCK=16)
        gate[(x.shape[0],)](y, factor, x.shape[1], BLOCK=16)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = torch.empty_like(x)
        s = torch.sigmoid(x * weight)
        dz = dy * ctx.factor * s * (1 - s)
        multiply[(x.shape[0],)](dz.contiguous(), weight, dx, x.shape[1], BLOCK=16)
        return dx, (dz * x).sum(0), None


EAGER_IS_SEEN = {
    "cpu": "launches the forward launches no kernel of its own: something else computes the result",
    "cuda": "launches the forward launches 3 kernels (",
}


@pytest.mark.parametrize("planted", ["Pair", "eager"])
def test_the_unfused_pair_under_a_fused_name(toy, planted, device):
    pair = "launches the forward launches 2 kernels (multiply, gate) where 1 are declared"
    message = pair if planted == "Pair" else EAGER_IS_SEEN[device.type]
    toy.native = Pair.apply if planted == "Pair" else toy.native
    implementation = Implementation("triton", Level.TRITON, "toy:native")
    operation = dataclasses.replace(
        toy.gate,
        levels=[toy.gate.implementation("reference"), implementation],
        cost=lambda case, direction: Cost(1, 1, launches=1 if direction is Direction.FORWARD else None),
    )
    trial = next(t for t in trials(operation, device) if t.case.core)
    found = verify_trial(toy.technique, operation, implementation, trial, device)
    assert not found.passed
    assert any(message in line for line in found.failures()), found.failures()

    two = lambda case, direction: Cost(1, 1, launches=2 if direction is Direction.FORWARD else None)  # noqa: E731
    again = verify_trial(toy.technique, dataclasses.replace(operation, cost=two), implementation, trial, device)
    assert again.passed is (planted == "Pair"), "what is declared is no deceit"


def test_a_compiled_function_on_the_cpu_is_not_asked_for_kernels_that_nobody_can_see(toy):
    implementation = Implementation("cuda", Level.CUDA, "toy:native")
    operation = dataclasses.replace(toy.gate, levels=[toy.gate.implementation("reference"), implementation])
    toy.unavailable = lambda level, device, dtype: None
    trial = next(t for t in trials(operation, CPU) if t.case.core)
    found = verify_trial(toy.technique, operation, implementation, trial, CPU)
    assert found.error_checks
    assert found.passed, found.failures()
    assert is_counted(Level.CUDA, torch.device("cuda"))
