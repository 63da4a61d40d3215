"""A declaration that cannot be right is refused where it is written."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from kernel_pytorch.harness.exemptions import SUPPORT_ROWS
from kernel_pytorch.harness.support import CAPABILITIES
from kernel_pytorch.harness.technique import Case, Exemption, Implementation, Level, grid, point


def test_two_references_are_refused(toy):
    second = dataclasses.replace(toy.gate.reference, name="second")
    with pytest.raises(ValueError, match="gate: levels must hold exactly one 'reference' level"):
        dataclasses.replace(toy.gate, levels=[toy.gate.reference, second])


def test_no_reference_is_refused(toy):
    with pytest.raises(ValueError, match="exactly one 'reference' level"):
        dataclasses.replace(toy.gate, levels=[toy.gate.implementation("native")])


def test_two_implementations_of_one_name_are_refused(toy):
    twice = [*toy.gate.implementations, Implementation("native", Level.PEER, "toy:native")]
    with pytest.raises(ValueError, match="two implementations share a name: reference, native"):
        dataclasses.replace(toy.gate, levels=twice)


def test_a_grid_without_float32_is_refused(toy):
    low = grid(point("plain", core=True, rows=1, columns=1), dtypes=(torch.float16, torch.bfloat16))
    with pytest.raises(ValueError, match="test_grid has no float32 case"):
        dataclasses.replace(toy.gate, test_grid=low)


def test_a_grid_without_a_core_case_is_refused(toy):
    coreless = grid(point("plain", rows=1, columns=1), dtypes=(torch.float32,))
    with pytest.raises(ValueError, match="test_grid has no core case"):
        dataclasses.replace(toy.gate, test_grid=coreless)


def test_an_empty_grid_is_refused():
    with pytest.raises(ValueError, match=r"points is empty; give at least one point\(\.\.\.\)"):
        grid(dtypes=(torch.float32,))


@pytest.mark.parametrize(
    ("factor", "reason", "problem"),
    [
        (4.5, "a good one", "budget_factor is 4.5; allowed is above 0 and at most 4"),
        (0.0, "", "budget_factor is 0.0; allowed is above 0 and at most 4"),
        (3.0, "", "budget_factor 3.0 is above 2 and needs budget_reason"),
    ],
)
def test_a_budget_needs_its_reason_and_has_its_limit(factor, reason, problem):
    with pytest.raises(ValueError, match=f"^native: {problem}"):
        Implementation("native", Level.NATIVE, "toy:native", budget_factor=factor, budget_reason=reason)


def test_a_larger_budget_with_its_reason_is_taken():
    allowed = Implementation("native", Level.NATIVE, "toy:native", budget_factor=4.0, budget_reason="sums in any order")
    assert allowed.budget_factor == 4.0


@pytest.mark.parametrize("what", ["strided view", "packed view", "no such thing", "imitated activations"])
def test_nothing_is_exempt_from_layouts_or_from_what_does_not_exist(what):
    with pytest.raises(ValueError, match=f"exemption: '{what}' is no property that can be exempt; allowed are fullgra"):
        Exemption((what,), "a good one", arguments=("x",))


def test_the_rows_that_can_be_exempt_are_those_of_the_support_table():
    assert tuple(c.name for c in CAPABILITIES) == SUPPORT_ROWS


@pytest.mark.parametrize("level", ["triton", "cuda"])
def test_kernels_of_ours_are_exempt_from_no_adversary_on_their_own(level):
    with pytest.raises(ValueError, match=f"exemption: levels names '{level}', which must handle NaN, or name instead"):
        Exemption(("NaN",), "a good one", ("native", level))


@pytest.mark.parametrize("level", ["triton", "cuda"])
def test_kernels_of_ours_may_be_checked_against_another_level_instead(toy, level):
    exemption = Exemption(("NaN",), "a good one", (level,), instead="nobody")
    with pytest.raises(ValueError, match="gate: exemptions names nobody; levels are reference"):
        dataclasses.replace(toy.gate, exemptions=[exemption])


def test_an_exemption_names_levels_that_exist(toy):
    with pytest.raises(ValueError, match="gate: exemptions names fast; levels are reference, native, compile, cuda"):
        dataclasses.replace(toy.gate, exemptions=[Exemption(("opcheck",), "a good one", ("fast",))])


def test_what_is_shift_invariant_must_be_data(toy):
    with pytest.raises(ValueError, match="gate: shift invariant names weight; data are x"):
        dataclasses.replace(toy.gate, roles={"data": ("x",), "shift invariant": ("x", "weight")})


def test_a_role_that_does_not_exist_is_refused(toy):
    with pytest.raises(ValueError, match="gate: roles names dates; allowed are data, shift invariant, rows, constant"):
        dataclasses.replace(toy.gate, roles={"dates": ("x",)})


@pytest.mark.parametrize(("what", "reason"), [("zero rows", ""), ("zero rows", None), ("opcheck", "")])
def test_an_exemption_needs_its_reason(what, reason):
    with pytest.raises(ValueError, match=f"exemption: {what} needs a reason"):
        Exemption((what,), reason, arguments=("x",))


def test_an_argument_that_is_no_data_cannot_be_exempt(toy):
    exemption = Exemption(("zero rows",), "a good one", arguments=("x", "weight"))
    with pytest.raises(ValueError, match="gate: exemptions names weight; data are x"):
        dataclasses.replace(toy.gate, exemptions=[exemption])


def test_a_case_reads_its_sizes_as_attributes():
    case = Case("plain", torch.float16, {"rows": 3, "columns": 5})
    assert (case.rows, case.columns) == (3, 5)
    assert pickle.loads(pickle.dumps(case)) == case
    with pytest.raises(AttributeError, match="case 'plain' has no size 'heads'; it has rows, columns"):
        _ = case.heads


def test_a_label_tells_cases_apart():
    sizes = {"shape": (3, 5), "weight_dtype": torch.float32}
    case = Case("plain", torch.float16, sizes)
    assert case.label == "plain [shape=(3, 5) weight_dtype=float32] float16"
    assert case.dtype_name == "float16"
    others = [dataclasses.replace(case, dtype=torch.float32), dataclasses.replace(case, sizes={"shape": (3, 6)})]
    assert len({case, *others}) == 3


def test_a_grid_is_the_product_of_points_and_dtypes():
    both = (torch.float32, torch.float16)
    cases = grid(point("a", rows=1), point("b", rows=2, dtypes=[torch.bfloat16]), dtypes=both).cases()
    assert [(c.name, c.dtype) for c in cases] == [("a", both[0]), ("a", both[1]), ("b", torch.bfloat16)]


def test_a_point_stays_on_the_devices_that_it_names():
    both = grid(point("everywhere", rows=1), point("large", rows=2, devices=["cuda"]), dtypes=(torch.float32,))
    assert [case.name for case in both.cases("cpu")] == [case.name for case in both] == ["everywhere"]
    assert [case.name for case in both.cases("cuda")] == ["everywhere", "large"]


def test_what_does_not_exist_is_answered_with_what_does(toy):
    with pytest.raises(KeyError, match="gate has no level 'assembler'; it has reference, native, compile, cuda"):
        toy.gate.implementation("assembler")
    with pytest.raises(KeyError, match="toy has no operation 'door'; it has gate"):
        toy.technique.operation("door")


def test_names_are_found(toy):
    assert toy.technique.operation("gate") is toy.gate
    assert toy.gate.implementation("native").level is Level.NATIVE
    assert toy.gate.signature() == ["x", "weight", "factor"]


def test_an_implementation_is_imported_only_when_it_is_loaded():
    absent = Implementation("peer:nobody", Level.PEER, "a_library_that_nobody_has:function")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_nobody_has"):
        absent.load()
