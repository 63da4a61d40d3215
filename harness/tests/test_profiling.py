"""A profile: no time counted twice, limits kept, memory by category, trace and snapshot."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.machine import BandwidthPoint, Ceilings, Machine
from kernel_pytorch.harness.profiling import cost, events, profile_module
from kernel_pytorch.harness.profiling.profile import TOTAL, peak_memory
from kernel_pytorch.harness.profiling.records import NOT_KNOWN, TOO_FAST, WIDTHS, cells, remarks, summary

CPU = torch.device("cpu")
MIB = 2**20
SCRIPT = "<script>alert(1)</script>"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Network(nn.Module):
    """A layer, an annotation with a hostile name, another layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x):
        with torch.profiler.record_function(SCRIPT):
            hidden = torch.relu(self.first(x))
        return self.second(hidden)


@pytest.fixture
def network():
    torch.manual_seed(0)
    return Network()


@pytest.fixture(scope="module")
def profiled():
    """A network's profile, forward and backward, on a machine so fast that nothing is faster."""
    point = BandwidthPoint(bytes=MIB, bytes_per_second=1e18, peak_bytes_per_second=1e18, memory="DRAM")
    ceilings = Ceilings(bandwidth=(point,), matmul_flops_per_second={"float32": 1e18}, launch_overhead_seconds=1e-6)
    machine = Machine(environment=describe_environment(CPU), ceilings=ceilings)
    return profile_module(Network(), torch.randn(64, 32), backward=True, steps=2, machine=machine)


def adds_up(durations, wall):
    """Whether times can all have been spent one after the other."""
    return 0.0 < sum(durations) <= wall


def test_the_rows_add_up_to_no_more_than_the_wall_clock(profiled):
    assert adds_up([row.seconds for row in profiled.operators], profiled.profiled_seconds)
    assert sum(row.share for row in profiled.operators) == pytest.approx(1.0)


def test_counting_every_event_whole_counts_time_twice(network):
    recorder = events.profiler(CPU)
    with recorder, torch.profiler.record_function(events.STEP):
        network(torch.randn(64, 32))
    everything = [e.time_range.elapsed_us() for e in recorder.events() if e.name != "[memory]"]
    wall = max(everything)  # the annotation around it all
    assert not adds_up(everything, wall)
    recorded, _ = events.read(recorder, CPU)
    assert adds_up([call.seconds * 1e6 for call in recorded], wall * 1.001)  # nanoseconds beside microseconds


def test_the_unit_is_the_outermost_operator_with_a_kernel(profiled):
    kinds = {row.name: row.kind for row in profiled.operators}
    assert kinds["aten::addmm"] == "operator"
    assert kinds["aten::linear"] == "host"  # nothing but calls of aten::t and aten::addmm
    assert kinds[events.STEP] == "host"
    assert "aten::copy_" not in kinds  # a part of aten::addmm
    assert not [name for name in kinds if name.startswith("autograd::engine")]
    layers = [row for row in profiled.operators if row.name == "aten::addmm"]
    assert {row.inputs for row in layers} == {
        ("float32 64", "float32 64x32", "float32 32x64"),
        ("float32 16", "float32 64x64", "float32 64x16"),
    }
    assert all(row.calls == profiled.steps for row in layers)


def test_a_step_is_a_forward_and_its_backward_and_gradients_are_put_back(network, machine):
    kept = torch.ones_like(network.first.weight)
    network.first.weight.grad = kept
    found = profile_module(network, torch.randn(64, 32), backward=True, steps=1, machine=machine)
    assert (found.direction, found.module, found.inputs) == ("both", "Network", ("float32 64x32",))
    names = {row.name for row in found.operators}
    assert "aten::threshold_backward" in names
    assert not any(name.startswith("aten::add_") for name in names), "gradients of the step before are there"
    assert network.first.weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert network.second.weight.grad is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps is 0; allowed is 1 or more"),
        ({"backward": True}, "no output of the module requires a gradient"),
    ],
)
def test_what_cannot_be_profiled_says_so(machine, arguments, message):
    with pytest.raises(ValueError, match=message):
        profile_module(nn.Identity(), torch.ones(3), machine=machine, **arguments)


def test_tensors_on_two_devices_are_refused(machine):
    with pytest.raises(ValueError, match="are on cpu and meta; move all to one device"):
        profile_module(nn.Linear(2, 2), torch.ones(3, 2, device="meta"), machine=machine)


@pytest.mark.parametrize(
    ("shares", "arguments"),
    [
        ("memory", (2**30, 0)),
        ("compute", (2**10, 10**13)),
        ("overhead", (2**10, 10)),
        (None, (None, None)),
        (None, (None, 10)),
    ],
)
def test_what_binds_is_what_the_limits_say_takes_longest(shares, arguments):
    point = BandwidthPoint(bytes=MIB, bytes_per_second=1e12, peak_bytes_per_second=1e12, memory="DRAM")
    ceilings = Ceilings(bandwidth=(point,), matmul_flops_per_second={"float32": 1e12}, launch_overhead_seconds=1e-6)
    assert cost.place(*arguments, 100.0, torch.float32, ceilings).bound == shares


def test_each_rate_has_a_limit_of_its_own():
    point = BandwidthPoint(bytes=MIB, bytes_per_second=1e9, peak_bytes_per_second=2e9, memory="DRAM")
    ceilings = Ceilings(bandwidth=(point,), matmul_flops_per_second={"float32": 1e9}, launch_overhead_seconds=1e-6)
    for moved, arithmetic, above in (
        (10**9, 10**9, ()),
        (2 * 10**9, 10**9, ()),  # above the copy, not above the fastest stream
        (3 * 10**9, 10**9, ("memory",)),
        (10**9, 2 * 10**9, ("compute",)),
        (3 * 10**9, 2 * 10**9, ("memory", "compute")),
    ):
        placed = cost.place(moved, arithmetic, 1.0, torch.float32, ceilings)
        assert placed.above == above
        assert bool(placed.problem) == bool(above)


def test_what_is_above_the_limit_is_no_success(network, make_machine):
    found = profile_module(network, torch.randn(64, 32), steps=1, machine=make_machine(1.0))
    layer = next(row for row in found.operators if row.name == "aten::addmm")
    assert layer.attained.problem.startswith("faster than the limit: overcounted")
    assert layer.attained.above == ("memory",)
    assert TOO_FAST in str(found.table())
    assert cells(layer, found.steps)[list(WIDTHS).index("bytes/s, of copy")] == TOO_FAST
    assert "times the fastest stream measured on this machine" in layer.attained.problem
    assert any("aten::addmm" in line and "faster than the limit" in line for line in remarks(found, 5))


def test_memory_is_split_by_what_it_is_for(profiled):
    memory = profiled.memory
    assert memory.note == ""
    assert {"parameters", "activations", "gradients"} <= set(memory.at_peak)
    assert memory.at_peak["parameters"] == 4 * (32 * 64 + 64 + 64 * 16 + 16)
    assert sum(memory.at_peak.values()) == memory.peak


def test_memory_of_a_forward_is_not_split():
    def two_temporaries():
        first = torch.empty(MIB // 4)
        second = first + 1  # both are there
        del first
        return second.sum()

    two_temporaries()
    found = peak_memory(two_temporaries, CPU)
    assert found.at_peak == {TOTAL: found.peak}
    assert found.note == "not split: the profiler saw no gradient"
    assert 2 * MIB <= found.peak < 2 * MIB + 4096


def test_what_the_profiler_cannot_split_is_told_whole(monkeypatch):
    def broken(self):
        raise AssertionError("a graph it does not know")

    monkeypatch.setattr(torch.profiler.profile, "_memory_profile", broken)
    found = peak_memory(lambda: torch.empty(MIB // 4) + 1, CPU)
    assert found.note == "not split: the profiler failed on it (AssertionError: a graph it does not know)"
    assert 2 * MIB <= found.peak < 2 * MIB + 4096


def test_nothing_allocated_is_no_error():
    found = peak_memory(lambda: None, CPU)
    assert (found.peak, found.at_peak) == (0, {})


def test_an_option_of_the_page_that_was_cut_warns(profiled, tmp_path):
    with pytest.warns(DeprecationWarning, match=r"page\.html is no longer written.*ui\.perfetto\.dev"):
        profiled.write(tmp_path, top=3)


def test_the_record_is_written(profiled, tmp_path):
    (written,) = profiled.write(tmp_path / "new")
    assert type(profiled).model_validate_json(written.read_text()) == profiled


def test_the_table_shows_what_is_known_and_says_what_is_not(profiled):
    printed = str(profiled.table(top=100))
    assert f"Network, forward and backward, on {profiled.machine.environment.device_name}" in printed
    assert SCRIPT in printed.replace("\n", "")
    assert NOT_KNOWN not in printed
    assert any(line.startswith("A step takes ") for line in summary(profiled))


def test_a_trace_is_written_for_perfetto(network, machine, tmp_path):
    import json

    profile_module(network, torch.randn(4, 32), steps=1, machine=machine, trace=tmp_path / "trace.json")
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"aten::addmm", events.STEP, "[memory]"} <= names


def test_a_snapshot_on_a_cpu_is_refused(network, machine, tmp_path):
    with pytest.raises(ValueError, match="memory snapshots on CUDA only; the module is on cpu"):
        profile_module(network, torch.randn(4, 32), machine=machine, snapshot=tmp_path / "memory.pickle")


@pytest.mark.gpu
@needs_gpu
def test_a_snapshot_holds_the_allocations_of_a_step(network, machine, tmp_path):
    import pickle

    network, x = network.cuda(), torch.randn(64, 32, device="cuda")
    profile_module(network, x, backward=True, machine=machine, snapshot=tmp_path / "memory.pickle")
    written = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    assert any(event["action"] == "alloc" for events in written["device_traces"] for event in events)
    torch.empty(8, device="cuda")
    torch.cuda.memory._dump_snapshot(str(tmp_path / "after.pickle"))
    after = pickle.loads((tmp_path / "after.pickle").read_bytes())
    assert not any(after["device_traces"]), "recording goes on"


LAZY = """
import sys
import kernel_pytorch.harness as harness
assert "torch" not in sys.modules, "importing the harness imports torch"
for name in harness.__all__:
    assert callable(getattr(harness, name)), name
loaded = {"matplotlib", "triton", "torch._dynamo", "torch._inductor"} & set(sys.modules)
assert not loaded, f"importing the names imports {loaded}"
try:
    harness.nope
except AttributeError as error:
    assert "has no attribute 'nope'" in str(error)
else:
    raise AssertionError("a name that is not there was found")
"""


def test_importing_the_harness_stays_fast():
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@needs_gpu
# torch says so where a thread of the backward is the first to multiply matrices.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
def test_kernels_are_placed_through_the_operator_that_launched_them():
    module = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda().bfloat16()
    x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)
    found = profile_module(module, x, backward=True, steps=3)
    layer = next(row for row in found.operators if row.name == "aten::addmm")
    assert layer.kernels
    assert layer.flops == 2 * 8192 * 1024 * 4096
    assert layer.bytes == 2 * (4096 + 8192 * 1024 + 1024 * 4096 + 8192 * 4096)
    assert layer.attained.bound == "compute"
    assert layer.seconds == pytest.approx(sum(kernel.seconds for kernel in layer.kernels))
    total = sum(row.seconds for row in found.operators)
    assert 0.0 < found.busy_seconds <= total * 1.001
    assert total <= found.profiled_seconds
    assert found.device_peak >= found.memory.peak > 2 * 8192 * 4096
    assert "activations" in found.memory.at_peak


@pytest.mark.gpu
@needs_gpu
def test_kernels_that_no_operator_launched_are_listed_by_themselves():
    x, graph = torch.ones(2**20, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul_(2.0)

    class Replayed(nn.Module):
        def forward(self, x):
            graph.replay()
            return x

    rows = profile_module(Replayed(), x, steps=2).operators
    kernel = next(row for row in rows if row.kind in ("kernel", "function"))
    assert kernel.bytes is None
    assert kernel.seconds > 0.0
