"""The table of a package: the default goes by what its rows name, and what cannot run says why."""

import functools
import itertools
import sys
import types

import pytest
import torch
from torch import Tensor

from kernel_pytorch.rmsnorm._core import levels
from kernel_pytorch.rmsnorm._core.levels import LEVELS, Default, Ladder
from kernel_pytorch.rmsnorm._core.operator import declare

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Compiled:
    """What a package of compiled operators says of itself."""

    def unavailable(self, device, dtype):
        return "no float64" if dtype == torch.float64 else None

    def describe(self, device):
        return f"compiled for {device.type}"

    def function(self, name):
        return lambda: f"cuda_ops.{name}"


@pytest.fixture
def ladder(monkeypatch):
    """Two functions, of which one has no level cuda; a GPU of compute capability 9.0."""
    for level in LEVELS:
        module = types.ModuleType(f"made_up.{level}")
        module.both, module.one = (lambda level=level: level), (lambda level=level: f"one {level}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "made_up", types.ModuleType("made_up"))
    monkeypatch.setattr(levels, "compute_capability", lambda device: (9, 0))
    rows = [
        Default("cuda", record="a", functions=["both"], capabilities=[(9, 0)], dtypes=[torch.bfloat16, torch.float64]),
        Default("triton", record="a", capabilities=[(9, 0)]),
        Default("cuda", record="b", device="cpu", dtypes=[torch.bfloat16]),
    ]
    return Ladder({"both": "made_up", "one": "made_up"}, rows, Compiled(), absent={"one": ["cuda"]})


@pytest.mark.parametrize(
    ("function", "device", "dtype", "level"),
    [
        ("both", GPU, torch.bfloat16, "cuda"),
        ("both", GPU, torch.float64, "triton"),  # where the first row cannot run the next one counts
        ("both", GPU, torch.float32, "triton"),
        ("one", GPU, torch.bfloat16, "triton"),
        ("both", CPU, torch.bfloat16, "cuda"),
        ("one", CPU, torch.bfloat16, "native"),  # it has no such level
        ("both", CPU, torch.float32, "native"),
        ("both", torch.device("meta"), torch.bfloat16, "native"),
    ],
)
def test_the_first_row_that_covers_a_call_and_can_run_is_its_default(ladder, function, device, dtype, level):
    assert ladder.default(function, device, dtype) == level


def test_other_cards_get_native(ladder, monkeypatch):
    monkeypatch.setattr(levels, "compute_capability", lambda device: (12, 0))
    assert ladder.default("both", GPU, torch.bfloat16) == "native"


def test_what_is_traced_may_have_another_default(ladder):
    """As TorchInductor fuses PyTorch's operators, and not ours."""
    ladder.defaults = (Default("triton", record="a", capabilities=[(9, 0)], traced=False), *ladder.defaults)
    assert ladder.default("both", GPU, torch.bfloat16) == "triton"
    assert ladder.default("both", GPU, torch.bfloat16, traced=True) == "native"
    assert ladder.default("both", CPU, torch.bfloat16, traced=True) == "cuda"


def test_torch_compile_asks_for_what_is_traced(ladder, monkeypatch):
    row = Default("cuda", record="b", device="cpu", traced=False)
    ladder.defaults = (row,)
    traced = torch.compile(lambda x: x + len(ladder.chosen("both", None, x)), backend="eager", fullgraph=True)
    assert traced(torch.zeros(())) == len("native")
    assert ladder.chosen("both", None, torch.zeros(())) == "cuda"


def test_a_level_by_name_is_that_level_or_an_error(ladder):
    x = torch.ones(2)
    assert [ladder.resolve("both", level, x)() for level in ("reference", "native", "cuda")] == [
        "reference",
        "native",
        "cuda",
    ]
    with pytest.raises(ValueError, match="level: given 'hip'; allowed are None, 'reference'"):
        ladder.resolve("both", "hip", x)
    with pytest.raises(ValueError, match="level: 'cuda' of one does not exist yet; it has 'reference', 'native'"):
        ladder.resolve("one", "cuda", x)
    with pytest.raises(RuntimeError, match="level 'cuda' of both cannot run here: no float64"):
        ladder.resolve("both", "cuda", x, None, x.double())


def test_a_default_that_another_tensor_keeps_from_running_is_native(ladder):
    x = torch.ones(2, dtype=torch.bfloat16)
    assert ladder.resolve("both", None, x)() == "cuda"
    assert ladder.resolve("both", None, x, x.double())() == "native"


def test_what_was_resolved_is_remembered_by_all_that_decides(ladder):
    x = torch.ones(2, dtype=torch.bfloat16)
    asked = [ladder.resolve("both", None, t)() for t in (x, x.float(), x, x.float())]
    assert asked == ["cuda", "native"] * 2
    assert torch.func.grad(lambda x: [asked.append(ladder.resolve("both", None, x)()), x.sum()][1])(x) is not None
    assert asked[-1] == "native"  # kernels have no rules for transforms


def test_whether_the_default_is_pytorchs_own(ladder):
    x = torch.ones(2, dtype=torch.bfloat16)
    assert torch.func.grad(lambda x: x.sum() * ladder.is_native("both", x))(x).tolist() == [1.0, 1.0]
    assert [ladder.is_native("both", t) for t in (x, x.float(), x)] == [False, True, False]
    with ladder.replaced("both", "cuda", print):
        assert not ladder.is_native("both", x)


def test_what_it_says_of_levels(ladder):
    assert ladder.describe("cuda", CPU) == "compiled for cpu"
    assert ladder.describe("native", CPU) == ""
    without = Ladder({"both": "made_up"}, [], None, absent={"both": ["cuda"]})
    assert without.unavailable("cuda", CPU, torch.float32) == "the package has none"
    assert without.levels("both") == LEVELS[:-1]


def test_levels_without_a_function_of_their_own_are_derived(monkeypatch):
    """The definition is compiled, or what the table names instead; CUDA C++ has a name for each function."""
    for level in LEVELS:
        module = types.ModuleType(f"made_up.{level}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for level in ("reference", "native", "triton"):
        sys.modules[f"made_up.{level}"].both = lambda x, level=level: (level, x)
    monkeypatch.setattr(levels, "compiled", lambda function: lambda x: ("compiled", *function(x)))
    monkeypatch.setattr(levels, "scripted", lambda function: lambda x: ("scripted", *function(x)))
    monkeypatch.setitem(sys.modules, "made_up", types.ModuleType("made_up"))
    plain = Ladder({"both": "made_up"}, [], Compiled())
    assert plain.function("both", "compile")(1) == ("compiled", "reference", 1)
    assert plain.function("both", "torchscript")(1) == ("scripted", "reference", 1)
    assert plain.function("both", "cuda")() == "cuda_ops.both"
    other = Ladder({"both": "made_up"}, [], Compiled(), derived={"compile": {"both": "native"}, "cuda": {"both": "b"}})
    assert other.function("both", "compile")(1) == ("compiled", "native", 1)
    assert other.function("both", "cuda")() == "cuda_ops.b"


def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


def scaled_with_more(x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return x * factor, x + 1.0


@pytest.fixture
def made_up(monkeypatch):
    """Make a package: its definition, its operators, and other modules of it by name."""
    names = itertools.count()

    def make(definition, **modules):
        package = f"made_up_{next(names)}"
        modules = {"": {}, ".levels": {}, ".levels.reference": {"scaled": definition}} | {
            f".{name.replace('_', '.')}": contents for name, contents in modules.items()
        }
        for name, contents in modules.items():
            module = types.ModuleType(f"{package}{name}")
            vars(module).update(contents)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return {"scaled": f"{package}.levels"}

    return make


@functools.cache
def operator():
    return declare(
        "test_levels_scaled(Tensor x, float factor) -> (Tensor y, Tensor more, Tensor rest)",
        launch=lambda: lambda x, factor: (x * factor, x + 1.0, x.clone()),
        fake=lambda x, factor: (torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)),
    )


def test_triton_is_the_operator_and_native_the_definition_where_no_file_says_else(made_up):
    x = torch.ones(2)
    ladder = Ladder(made_up(scaled, operators={"scaled": operator()}), [], None)
    assert ladder.levels("scaled") == LEVELS[:-1]
    assert ladder.function("scaled", "native") is scaled
    assert ladder.describe("native", CPU) == "the definition as it stands"
    with torch.no_grad():
        assert torch.equal(ladder.function("scaled", "triton")(x, 2.0), 2.0 * x)
        both = Ladder(made_up(scaled_with_more, operators={"scaled": operator()}), [], None)
        assert [y.tolist() for y in both.function("scaled", "triton")(x, 3.0)] == [[3.0, 3.0], [2.0, 2.0]]
    named = {"triton": {"scaled": "other"}}
    assert "triton" in Ladder(made_up(scaled, operators={"other": operator()}), [], None, derived=named).levels(
        "scaled"
    )
    written = made_up(
        scaled, operators={"scaled": operator()}, levels_triton={"scaled": print}, levels_native={"scaled": len}
    )
    assert [Ladder(written, [], None).function("scaled", level) for level in ("native", "triton")] == [len, print]


def test_without_an_operator_there_is_no_level_triton(made_up):
    for operators in ({}, {"operators": {}}, {"operators": {"scaled": print, "other": operator()}}):
        ladder = Ladder(made_up(scaled, **operators), [], None)
        assert ladder.levels("scaled") == ("reference", "native", "torchscript", "compile")


def test_an_operator_with_other_arguments_needs_a_function_that_maps_them(made_up):
    with pytest.raises(ImportError, match=r"not take \(x, alpha\) of <lambda>: write the function of level 'triton'"):
        Ladder(made_up(lambda x, alpha: x, operators={"scaled": operator()}), [], None)
    with pytest.raises(ImportError, match=r"made_up_1\.levels\.triton: it has no function scaled"):
        Ladder(made_up(scaled, levels_triton={"scald": print}), [], None)
    with pytest.raises(ImportError, match=r"made_up_2\.levels\.native: it has no function scaled"):
        Ladder(made_up(scaled, levels_native={"scald": print}), [], None)


def test_a_level_that_is_not_derived_needs_a_function(monkeypatch):
    for name in ("made_up", "made_up.reference", "made_up.native"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(ImportError, match=r"made_up\.reference: it has no function both"):
        Ladder({"both": "made_up"}, [], None, absent={"both": ["cuda"]})
