"""The default level of every group, held against the committed measurements."""

import importlib
from pathlib import Path

import pytest
import torch

from kernel_pytorch.fused_ln_act import levels
from kernel_pytorch.fused_ln_act._core import cuda_level
from kernel_pytorch.fused_ln_act._core import levels as core
from kernel_pytorch.fused_ln_act.functional import linear_act, swiglu
from kernel_pytorch.fused_ln_act.levels import GATED, LADDER, NORM
from kernel_pytorch.fused_ln_act.linear.levels import native
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.results import CaseRecord, load

TECHNIQUE = discover().get("fused-ln-act")
FILES = sorted((Path(__file__).parents[3] / "results").glob("*/fused-ln-act.json"))
MEASURED = [load(file) for file in FILES]

pytestmark = pytest.mark.skipif(not FILES, reason="not a checkout")


def group_of(operation):
    return operation.implementation("triton").level_target().split(".")[2]


def why_not(functions, capability, level="triton"):
    """Why the kernels of these must not be the default on GPUs of a compute capability; empty if they may."""
    wanted = ".".join(map(str, capability))
    found = [r for r in MEASURED if r.machine.environment.compute_capability == wanted]
    if not found:
        return [f"no results of a device of compute capability {wanted}"]
    reasons = []
    for operation in (o for o in TECHNIQUE.operations if o.name in functions):
        own = [m for r in found for m in r.measurements if (m.operation, m.implementation) == (operation.name, level)]
        cases = {
            (CaseRecord.of(c).label, d) for c in operation.bench_grid.cases("cuda") for d in ("forward", "backward")
        }
        missing = cases - {(m.case.label, m.direction) for m in own if m.status == "measured"}
        reasons += [f"{operation.name}, {direction}, {label}: not measured" for label, direction in sorted(missing)]
    return reasons


@pytest.mark.parametrize("row", [row for row in LADDER.defaults if row.device == "cuda"], ids=repr)
def test_kernels_are_the_default_only_where_every_case_was_measured(row):
    assert {operation.name for operation in TECHNIQUE.operations} >= set(row.functions)
    assert row.capabilities
    for capability in row.capabilities:
        assert not why_not(row.functions, capability, row.level)


@pytest.mark.parametrize(("missing", "default"), [((), "cuda"), (("cuda",), "native")])
def test_what_cannot_run_is_no_default(missing, default, monkeypatch):
    """As on a GPU where the CUDA kernels of softmax are the fastest, with cuda-ops and without."""
    monkeypatch.setattr(core, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(LADDER, "unavailable", lambda level, *_: "not installed" if level in missing else None)
    assert LADDER.default("softmax", torch.device("cuda"), torch.float32) == default


def test_a_mask_that_the_default_cannot_take_leaves_the_choice_to_native(monkeypatch):
    """As on a GPU, whose kernels take no float64."""
    monkeypatch.setattr(
        LADDER, "unavailable", lambda level, _, dtype: "no" if (level, dtype) == ("cuda", torch.float64) else None
    )
    monkeypatch.setattr(LADDER, "default", lambda *_: "cuda")
    x, mask = torch.randn(2, 8), torch.zeros(8, dtype=torch.float64)
    assert LADDER.chosen("softmax", None, x, None) == "cuda"
    assert LADDER.chosen("softmax", None, x, mask) == "native"
    with pytest.raises(RuntimeError, match="level 'cuda' of softmax cannot run here: no"):
        LADDER.chosen("softmax", "cuda", x, mask)


def test_a_default_that_nothing_speaks_for_is_found():
    assert why_not(NORM, (8, 0)) == ["no results of a device of compute capability 8.0"]


def test_a_default_of_what_was_not_measured_is_found(monkeypatch):
    """As if the last case of a group had been left out."""
    of_gpu = [r for r in MEASURED if r.machine.environment.compute_capability == "9.0"]
    whole = max(of_gpu, key=lambda record: len(record.measurements))  # another has softmax alone
    last = [m for m in whole.measurements if m.operation == "reglu" and m.implementation == "triton"][-1]
    less = tuple(m for m in whole.measurements if m is not last)
    monkeypatch.setitem(why_not.__globals__, "MEASURED", [whole.model_copy(update={"measurements": less})])
    assert why_not(GATED, (9, 0)) == [f"reglu, {last.direction}, {last.case.label}: not measured"]


@pytest.mark.parametrize(
    ("dtype", "activation", "depth", "hidden", "columns", "default"),
    [
        (torch.bfloat16, "gelu", 8, 16, 24, "triton"),
        (torch.float16, "gelu", 8, 16, 24, "triton"),
        (torch.float32, "gelu", 8, 16, 24, "native"),  # no work for tensor cores
        # Rows of 24 bytes, which the copy engine cannot move: of x, of h, of y.
        (torch.bfloat16, "gelu", 12, 16, 24, "native"),
        (torch.bfloat16, "gelu", 8, 12, 24, "native"),
        (torch.bfloat16, "gelu", 8, 16, 12, "native"),
    ],
)
def test_the_default_of_linear_layers(dtype, activation, depth, hidden, columns, default, monkeypatch):
    functional, taken = as_on_a_card(monkeypatch)
    x, down = torch.ones(2, depth, dtype=dtype), torch.ones(columns, hidden, dtype=dtype)
    functional.gated_mlp(x, torch.ones(2 * hidden, depth, dtype=dtype), down, activation)
    functional.linear_act(x, torch.ones(hidden, depth, dtype=dtype), None, activation)
    assert taken == [default, default if columns == 24 else "triton"]


def test_the_default_of_what_nothing_follows_or_lies_otherwise(monkeypatch):
    functional, taken = as_on_a_card(monkeypatch)
    x, weight = torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(16, 8, dtype=torch.bfloat16)
    functional.linear_act(x, weight, None, "identity")
    functional.linear_act(x, torch.ones(8, 16, dtype=torch.bfloat16).t(), None, "gelu")
    functional.linear_act(torch.ones(2, 9, dtype=torch.bfloat16)[:, 1:], weight, None, "gelu")
    functional.linear_act(torch.ones(2, 16, dtype=torch.bfloat16)[:, 1:9], weight, None, "gelu")
    assert taken == ["native"] * 4
    functional.linear_act(x[0], weight, None, "gelu")
    functional.linear_act(x, weight, None, "identity", level="triton")
    assert taken[4:] == ["triton"] * 2


def as_on_a_card(monkeypatch):
    """The functions of linear layers as on a GPU of 9.0, where the tensors would be, and the levels that they take."""
    functional, taken = importlib.import_module("kernel_pytorch.fused_ln_act.linear.functional"), []
    card, plain = torch.device("cuda"), LADDER.default
    monkeypatch.setattr(core, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(LADDER, "unavailable", lambda *_: None)
    monkeypatch.setattr(LADDER, "default", lambda name, device, dtype, *traced: plain(name, card, dtype, *traced))

    def function(name, level):
        taken.append(level)
        return getattr(native, name)

    monkeypatch.setattr(LADDER, "function", function)
    LADDER.forget()
    return functional, taken


@pytest.fixture(autouse=True)
def forgotten():
    """What another test made of defaults is not remembered."""
    yield
    LADDER.forget()


@pytest.mark.parametrize(
    ("function", "dtype", "default"),
    [
        ("bias_dropout_add", torch.bfloat16, "cuda"),
        ("bias_act", torch.bfloat16, "cuda"),
        ("bias_act", torch.float32, "cuda"),
        ("add_layer_norm_act", torch.float32, "cuda"),
        ("rms_norm_act", torch.float32, "cuda"),
        ("layer_norm", torch.float32, "native"),
        ("bias_act", torch.float16, "native"),  # was not measured
    ],
)
def test_on_a_cpu_the_default_is_the_compiled_code_where_that_was_measured_faster(function, dtype, default):
    cpu = torch.device("cpu")
    if LADDER.unavailable("cuda", cpu, dtype) is not None:
        default = "native"
    assert LADDER.default(function, cpu, dtype) == default


def test_every_operation_is_of_the_group_of_its_modules():
    assert {operation.name: group_of(operation) for operation in TECHNIQUE.operations} == {
        function: group for group, functions in levels.GROUPS.items() for function in functions
    }


def test_a_twin_is_a_default_only_of_operations_that_have_one():
    compiled = {o.name for o in TECHNIQUE.operations for i in o.implementations if i.level.value == "cuda"}
    assert compiled == {function for function in LADDER.functions if "cuda" in LADDER.levels(function)}
    assert all(compiled >= set(row.functions) for row in LADDER.defaults if row.level == "cuda")


def test_a_level_that_an_operation_does_not_have_says_so():
    with pytest.raises(ValueError, match="'cuda' of linear_act does not exist yet; it has 'reference', 'native'"):
        linear_act(torch.ones(2, 8), torch.ones(4, 8), None, "gelu", level="cuda")


def test_the_compiled_level_is_what_is_asked_for():
    reason = LADDER.unavailable("cuda", torch.device("cpu"), torch.float32)
    if reason is not None:
        pytest.skip(reason)
    gate, up = torch.randn(2, 8, requires_grad=True), torch.randn(2, 8)
    assert swiglu(gate, up, level="cuda").grad_fn.name() == "gatedBackward"
    assert torch.equal(swiglu(gate, up, level="cuda"), cuda_level.cuda_ops.swiglu(gate, up))
    torch.testing.assert_close(swiglu(gate, up, level="cuda"), swiglu(gate, up, level="native"))
