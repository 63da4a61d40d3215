"""Quick functions: what is wrong, what remembers and what writes is exposed; the times themselves are not looked at."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console
from torch import nn

from kernel_pytorch.harness.clock.statistics import FEWEST_ROUNDS
from kernel_pytorch.harness.discovery import UnknownNameError
from kernel_pytorch.harness.quick import (
    compare_implementations,
    compare_levels,
    comparison,
    profile_memory,
    quick_benchmark,
)
from kernel_pytorch.harness.quick.growth import Growth, Scaling
from kernel_pytorch.harness.quick.inputs import Pool

MIB = 2**20
X, WEIGHT = torch.randn(32, 48), torch.randn(48)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch):
    """Few input sets: the times themselves are not looked at."""
    monkeypatch.setattr(comparison, "sets_for", lambda *arguments, **options: 3)


def reference(x, weight, scale=1.0):
    return torch.softmax(x * weight, -1) * scale


def equal(x, weight, scale=1.0):
    return nn.functional.softmax(torch.mul(x, weight), dim=-1).mul(scale)


@pytest.fixture
def compared(machine):
    """A comparison of some function with the reference."""

    def compare(function, *arguments, **named):
        implementations = {"reference": reference, "other": function}
        return compare_implementations(
            implementations, *(arguments or (X, WEIGHT)), rounds=FEWEST_ROUNDS, machine=machine, **named
        )

    return compare


def test_a_benchmark_carries_what_a_number_must(machine):
    found = quick_benchmark(torch.sigmoid, X, rounds=FEWEST_ROUNDS, machine=machine)
    assert (found.name, found.device, found.inputs) == ("sigmoid", "Made-up CPU", ("float32 32x48",))
    assert len(found.samples) == FEWEST_ROUNDS
    assert found.seconds.low <= found.seconds.median <= found.seconds.high
    assert found.bytes == 2 * 32 * 48 * 4
    assert found.pool_bytes == 3 * found.bytes
    assert found.bytes_per_second == pytest.approx(found.bytes / found.seconds.median)
    assert found.share_of_copy == pytest.approx(found.bytes_per_second / 1e18)
    assert found.notes == ()
    assert type(found).model_validate_json(found.to_json()) == found
    assert "sigmoid on Made-up CPU, float32 32x48" in str(found.table())


def test_the_bytes_of_a_module_hold_its_parameters(machine):
    layer = nn.Linear(48, 16)
    found = quick_benchmark(layer, X, rounds=FEWEST_ROUNDS, machine=machine)
    assert found.bytes == 4 * (32 * 48 + 48 * 16 + 16 + 32 * 16)


def test_a_benchmark_faster_than_the_machine_has_no_share(make_machine):
    found = quick_benchmark(torch.sigmoid, X, rounds=FEWEST_ROUNDS, machine=make_machine(1.0))
    assert found.share_of_copy is None
    assert found.problem.startswith("faster than the limit")
    assert "above the limit" in str(found.table())


def test_too_few_rounds_are_refused(machine):
    with pytest.raises(ValueError, match=f"rounds is 3; a 99% interval needs {FEWEST_ROUNDS} or more"):
        quick_benchmark(torch.sigmoid, X, rounds=3, machine=machine)


def test_arguments_of_another_kind_are_refused_with_what_is_allowed(site, toy, machine):
    site.install_toy()
    with pytest.raises(TypeError, match="levels: given 'native'; allowed is a list"):
        compare_levels("toy", levels="native", device="cpu")
    with pytest.raises(UnknownNameError, match="no device 'cuda:7'; available here are: cpu"):
        compare_levels("toy", device="cuda:7", machine=machine)


def test_a_comparison_holds_ratios_to_the_reference(compared, tmp_path):
    found = compared(equal, X, WEIGHT, scale=2.0)
    assert [c.status for c in found.contenders] == ["measured", "measured"]
    assert found.reference == "reference"
    assert found["reference"].comparison is None
    s = found["other"].comparison.speedup
    assert s.low <= s.median <= s.high
    assert found["other"].error_over_budget <= 1.0
    assert found.tolerance.startswith("4 times the error of the reference itself, against the reference in float64")
    printed = str(found.table())
    assert "vs reference" in printed
    assert "is it" in printed
    header = next(line for line in printed.splitlines() if "implementation" in line).split()
    assert header[1:6] == ["implementation", "┃", "median", "┃", "99%"], "each column stands above its figures"
    assert json.loads(found.to_json())["contenders"][1]["name"] == "other"
    assert type(found).model_validate_json(found.to_json()) == found
    with pytest.raises(ValueError, match=r"allowed are names that end in .png or .svg"):
        found.plot(tmp_path / "bars.txt")
    with pytest.raises(KeyError, match="no implementation 'nope'; there are reference, other"):
        found["nope"]


def test_what_is_faster_than_the_machine_is_told(make_machine):
    found = compare_implementations({"a": reference}, X, WEIGHT, rounds=FEWEST_ROUNDS, machine=make_machine(1.0))
    assert (found["a"].status, found["a"].share_of_copy) == ("measured", None)
    assert found.notes[0].startswith("a: faster than the limit")


def writing(x, weight):
    x.mul_(weight)
    return torch.softmax(x, -1)


def raising(x, weight):
    raise NotImplementedError("not for [this]")


WRONG = {
    "a little off": (lambda x, w: reference(x, w) * 1.00001, "output is off by"),
    "NaN": (lambda x, w: reference(x, w) * float("nan"), "output has 1536 NaN or infinite elements"),
    "writes its input": (writing, "argument 0 was written into"),
    "raises": (raising, "call raised NotImplementedError: not for [this]"),
    "another shape": (lambda x, w: reference(x, w)[0], "output is (48,) torch.float32, the reference's is (32, 48)"),
    "another dtype": (lambda x, w: reference(x, w).double(), "output is (32, 48) torch.float64, the reference's is"),
    "two outputs": (lambda x, w: (reference(x, w),) * 2, "outputs are 2, the reference has 1"),
    "no output": (lambda x, w: None, "call raised TypeError: it returned NoneType; only tensors and numbers"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_not_timed(compared, what, tmp_path):
    function, reason = WRONG[what]
    found = compared(function)["other"]
    assert (found.status, found.seconds, found.comparison) == ("wrong", None, None)
    assert reason in found.reason
    assert "wrong" in str(compared(function).table())


def test_the_bars_show_what_was_not_timed(compared, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib", reason="plots need matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # letters, not outlines
    comparison = compared(raising)
    assert comparison.plot(tmp_path / "new" / "bars.png").read_bytes().startswith(b"\x89PNG")
    drawn = comparison.plot(tmp_path / "bars.svg").read_text()
    for text in ("reference (reference): ", "other: wrong", "ms per call, median and 99% interval, on Made-up CPU"):
        assert text in drawn


def remembers_addresses():
    known = {}

    def function(x, weight):
        if x.data_ptr() not in known:
            known[x.data_ptr()] = reference(x, weight)
        return known[x.data_ptr()]

    return function


def remembers_the_first():
    known = []

    def function(x, weight):
        known.append(reference(x, weight))
        return known[0]

    return function


@pytest.mark.parametrize("make", [remembers_addresses, remembers_the_first])
def test_what_answers_new_values_with_an_old_result_has_its_time_struck_out(compared, make, tmp_path):
    comparison = compared(make())
    found = comparison["other"]
    assert found.status == "wrong"
    assert found.reason.startswith("after timing, on new values in memory that it had seen: output is off by")
    assert found.seconds is not None
    assert found.comparison is None
    row = next(line for line in str(comparison.table()).splitlines() if line.startswith("│ other"))
    assert "wrong" in row
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(comparison.table())
    assert "line-through" in console.export_html(inline_styles=True)


def test_what_remembers_results_by_value_gains_nothing(compared):
    """The time of such a function is that of a function that does not remember: no call finds what it knows."""
    known, hits = {}, []

    def function(x, weight):
        key = x.numpy().tobytes()  # a sum could be that of other values by accident
        hits.append(key in known)
        known.setdefault(key, reference(x, weight))
        return known[key]

    found = compared(function)
    assert found["other"].status == "measured"
    # Before sampling the clock calls every set to warm up and to find out how many calls make a sample.
    sampled = FEWEST_ROUNDS * 3
    assert sum(hits[-sampled - 2 : -2]) == 0


def test_inputs_that_stay_the_same_would_be_seen(compared, monkeypatch):
    monkeypatch.setattr(Pool, "refresh", lambda self: None)
    with pytest.raises(AssertionError):
        test_what_remembers_results_by_value_gains_nothing(compared)


def casts_inside(x, weight):
    return torch.softmax((x.float() * weight.float()), -1).to(x.dtype)


def refuses_float64(x, weight):
    if x.dtype == torch.float64:
        raise TypeError("float32 only")
    return reference(x, weight)


@pytest.mark.parametrize(
    ("function", "arguments", "why"),
    [
        (refuses_float64, (X, WEIGHT), "the reference does not run in float64 (TypeError: float32 only)"),
        (casts_inside, (X, WEIGHT), "the reference has no more digits in float64 than in torch.float32"),
        (lambda x, w: reference(x, w).float(), (X, WEIGHT), "no more digits in float64 than in torch.float32"),
        (reference, (X.double(), WEIGHT.double()), "no more digits in float64 than in torch.float64"),
    ],
)
def test_where_there_is_no_truth_the_tolerance_says_so(machine, function, arguments, why):
    implementations = {"first": function, "same": reference, "off": lambda x, w: reference(x, w) * 1.001}
    found = compare_implementations(implementations, *arguments, rounds=FEWEST_ROUNDS, machine=machine)
    assert found.tolerance.startswith("the tolerances of torch.testing.assert_close")
    assert found.tolerance.endswith(why)
    assert [c.status for c in found.contenders] == ["measured", "measured", "wrong"]
    assert found["off"].reason.startswith("output is off: Tensor-likes are not close")


def test_a_module_is_its_own_truth_in_float64(machine):
    layer = nn.Linear(48, 16)
    implementations = {"module": layer, "by hand": lambda x: torch.addmm(layer.bias, x, layer.weight.t())}
    found = compare_implementations(implementations, X, rounds=FEWEST_ROUNDS, machine=machine)
    assert [c.status for c in found.contenders] == ["measured", "measured"]
    assert "against the reference in float64" in found.tolerance
    assert layer.weight.dtype == torch.float32


def test_integers_and_dictionaries_are_compared_exactly(machine):
    implementations = {
        "both": lambda x: {"values": x.sort(-1).values, "places": x.sort(-1).indices, "count": len(x)},
        "backwards": lambda x: {"values": x.sort(-1).values, "places": x.sort(-1).indices.flip(-1), "count": len(x)},
    }
    found = compare_implementations(implementations, X, rounds=FEWEST_ROUNDS, machine=machine)
    assert found["both"].status == "measured"
    assert found["backwards"].reason.startswith("output 1 differs in ")


def test_complex_numbers_are_compared(machine):
    implementations = {"fft": torch.fft.fft, "conjugated": lambda x: torch.fft.fft(x).conj()}
    found = compare_implementations(implementations, X, rounds=FEWEST_ROUNDS, machine=machine)
    assert [c.status for c in found.contenders] == ["measured", "wrong"]


@pytest.mark.parametrize(
    ("implementations", "options", "message"),
    [
        ({}, {}, "implementations is empty; give functions by name"),
        ({"a": reference}, {"reference": "b"}, "reference is 'b'; the implementations are a"),
        ({"a": writing}, {}, "the reference wrote into argument 0; give one that leaves its inputs alone"),
    ],
)
def test_what_cannot_be_compared_says_so(machine, implementations, options, message):
    with pytest.raises(ValueError, match=message):
        compare_implementations(implementations, X, WEIGHT, machine=machine, **options)


def test_the_levels_of_a_technique_are_compared_and_absent_ones_say_why(site, toy, machine):
    site.install_toy()
    for name in ("toy", "toy.gate"):
        found = compare_levels(name, device="cpu", rounds=FEWEST_ROUNDS, machine=machine)
        assert [c.name for c in found.contenders] == ["reference", "native", "compile", "cuda"]
        assert [c.status for c in found.contenders] == ["measured"] * 3 + ["unavailable"]
        assert found["cuda"].reason == "the toy has no kernel"
        assert found.title == "toy.gate, plain rows=4 columns=16 float32"
        assert found.bytes == 2 * 4 * 16 * 4
    label = "larger rows=16 columns=64 float32"
    for case in ("larger", label, toy.gate.bench_grid.cases()[1]):
        found = compare_levels("toy", case, device="cpu", rounds=FEWEST_ROUNDS, machine=machine)
        assert found.title == f"toy.gate, {label}"


def test_levels_may_be_chosen_and_the_reference_stays(site, toy, machine):
    site.install_toy()
    found = compare_levels("toy", levels=["native"], device="cpu", rounds=FEWEST_ROUNDS, machine=machine)
    assert [c.name for c in found.contenders] == ["reference", "native"]
    with pytest.raises(UnknownNameError, match="gate has no level 'nope'; there are: reference, native, compile, cuda"):
        compare_levels("toy", levels=["nope"], device="cpu", machine=machine)


def test_a_wrong_level_is_reported(site, toy, machine, monkeypatch):
    site.install_toy()
    monkeypatch.setattr(toy, "native", lambda x, weight, factor: toy.reference(x, weight, factor) * 1.01)
    assert compare_levels("toy", device="cpu", rounds=FEWEST_ROUNDS, machine=machine)["native"].status == "wrong"


def test_names_that_fit_nothing_or_too_much_list_what_there_is(site, toy):
    site.install_toy()
    with pytest.raises(UnknownNameError, match="no technique 'nope'; installed are: toy"):
        compare_levels("nope", device="cpu")
    with pytest.raises(UnknownNameError, match="toy has no operation 'nope'; there are: gate"):
        compare_levels("toy.nope", device="cpu")
    with pytest.raises(
        UnknownNameError, match="gate: no cases are named 'nope'; there are: small rows=8 columns=64 float32; "
    ):
        compare_levels("toy", "nope", device="cpu")
    with pytest.raises(
        UnknownNameError, match="gate: 2 cases are named 'plain'; there are: plain rows=4 columns=16 fl"
    ):
        compare_levels("toy", "plain", device="cpu")


def test_a_technique_of_several_operations_needs_the_dotted_name(site, toy, monkeypatch):
    import dataclasses

    from kernel_pytorch.harness.quick import comparison

    second = dataclasses.replace(toy.gate, name="second")
    several = dataclasses.replace(toy.technique, operations=[toy.gate, second])
    monkeypatch.setattr(comparison, "discover", lambda: type("Found", (), {"get": lambda self, name: several})())
    with pytest.raises(UnknownNameError, match=r"toy has 2 operations; name one of them: toy.gate, toy.second"):
        compare_levels("toy", device="cpu")


def test_memory_of_a_function_and_of_a_module():
    x = torch.ones(MIB // 4)
    found = profile_memory(torch.sin, x)
    assert abs(found.forward_peak - MIB) < 4096
    assert found.training_peak >= 2 * MIB
    assert found.saved_for_backward == 0  # its argument is enough
    assert found.memory.peak >= 2 * MIB
    assert type(found).model_validate_json(found.to_json()) == found
    assert "sin on" in str(found.table())

    layer = nn.Sequential(nn.Linear(48, 64), nn.Sigmoid())
    found = profile_memory(layer, X)
    assert found.saved_for_backward == 0  # the input, the weight and the output, all of them known
    assert found.training_peak >= 4 * (48 * 64 + 64 + 32 * 48 + 2 * 32 * 64)


def test_memory_of_what_cannot_be_trained():
    found = profile_memory(torch.argmax, torch.ones(1000), dim=0)
    assert (found.training_peak, found.saved_for_backward) == (None, None)
    assert found.forward_peak == 8
    assert "nothing to train" in str(found.table())
    with pytest.raises(ValueError, match="no argument is a tensor; give the tensors that it works on"):
        profile_memory(torch.ones, 3)


@pytest.mark.gpu
@needs_gpu
# What remembers results launches nothing, and torch wonders about a graph of that.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_gpu_compares_and_exposes(monkeypatch):
    monkeypatch.undo()
    x, weight = torch.randn(4096, 4096, device="cuda"), torch.randn(4096, device="cuda")
    found = compare_implementations(
        {"reference": reference, "equal": equal, "remembers": remembers_addresses(), "writes": writing}, x, weight
    )
    assert [c.status for c in found.contenders] == ["measured", "measured", "wrong", "wrong"]
    assert quick_benchmark(torch.sigmoid, x).method.endswith(", cold L2")
    use = profile_memory(torch.sin, x)
    assert use.forward_peak == x.nbytes
    assert use.memory.peak >= 2 * x.nbytes


def test_pictures_and_laws_that_were_cut_name_what_replaces_them(tmp_path):
    file = tmp_path / "cut.svg"
    with pytest.warns(DeprecationWarning, match=r"no timeline: profile_module.*trace=.*_dump_snapshot"):
        assert profile_memory(torch.sin, X).plot(file) == file
    growth = Growth(exponent=1.0, factor=1.0, r_squared=1.0)
    with pytest.raises(AttributeError, match=r"Growth\.slope was removed.*use exponent and r_squared"):
        growth.slope  # noqa: B018
    with pytest.warns(DeprecationWarning, match="draws nothing any more; plot its points"):
        assert Scaling(name="f", device="cpu", points=(), growth=growth).plot(file) == file
