"""The truth, the budget, and what no candidate may do."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_pytorch.harness.adversaries import packed_view
from kernel_pytorch.harness.oracle import (
    ErrorCheck,
    Run,
    confirm,
    in_float64,
    judge,
    run,
    summands_by_shape,
    unit_in_the_last_place,
)

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
EPS = 2.0**-23  # of float32


def verdict(candidate, reference, truth, factor=2.0):
    """The error_check on one output."""
    runs = [Run((t,), {}) for t in (candidate, reference, truth)]
    (error_check,) = judge(*runs, factor)
    return error_check


def against_itself(candidate, truth):
    """The error_check where the reference is the truth, rounded."""
    truth = torch.tensor(truth, dtype=torch.float64)
    return verdict(torch.tensor(candidate, dtype=torch.float32), truth.float(), truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_unit_in_the_last_place_is_the_step_to_the_next_number(dtype, data):
    largest = torch.tensor([torch.finfo(dtype).max], dtype=dtype).view(BITS[dtype]).item()
    bits = torch.tensor([data.draw(st.integers(0, largest - 1))], dtype=BITS[dtype])
    number, following = bits.view(dtype).double(), (bits + 1).view(dtype).double()
    for sign in (1.0, -1.0):
        assert unit_in_the_last_place(sign * number, dtype).item() == (following - number).item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_the_unit_agrees_with_nextafter_at_the_edges(dtype):
    info = torch.finfo(dtype)
    edges = torch.tensor(
        [0.0, info.tiny * info.eps, info.tiny / 2, info.tiny, 1.0, 2.0, 1e30, info.max / 2], dtype=dtype
    )
    steps = torch.nextafter(edges, torch.full_like(edges, math.inf)).double() - edges.double()
    assert unit_in_the_last_place(edges.double(), dtype).tolist() == steps.tolist()


@given(st.integers(0, 1000), st.integers(0, 5000), st.integers(1, 4), st.sampled_from([1.0, -1.0]))
@settings(deadline=None)
def test_the_budget_is_the_factor_times_the_error_of_the_reference_and_one_unit(reference, ours, factor, sign):
    truth = torch.full((3,), sign, dtype=torch.float64)
    off = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64) * EPS * sign
    error_check = verdict((truth + ours * off).float(), (truth + reference * off).float(), truth, float(factor))
    assert error_check.passed == (ours <= factor * reference + 1)
    assert error_check.error_over_budget == pytest.approx(ours / (factor * reference + 1))


def test_just_inside_passes_and_just_outside_says_how_far():
    reference, truth = torch.tensor([1.0 + 8 * EPS]), torch.ones(1, dtype=torch.float64)
    assert verdict(torch.tensor([1.0 + 17 * EPS]), reference, truth).passed
    error_check = verdict(torch.tensor([1.0 + 18 * EPS]), reference, truth)
    assert not error_check.passed
    assert error_check.message.startswith(
        "is off by 2.15e-06 where 2.03e-06 is allowed (got 1, truth 1; 1 of 1 elements)"
    )


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
@settings(deadline=None)
def test_the_truth_itself_passes_in_every_dtype(values):
    truth = torch.tensor(values, dtype=torch.float64)
    for dtype in DTYPES:
        assert verdict(truth.to(dtype), truth.to(dtype), truth).passed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_fail_where_the_truth_is_finite(value):
    error_check = against_itself([1.0, value, 1.0], [1.0, 1.0, 1.0])
    assert not error_check.passed
    assert error_check.message == "has 1 NaN or infinite elements where the truth is finite"
    assert error_check.error_over_budget == math.inf


@pytest.mark.parametrize("truth", [1e39, math.inf])
def test_beyond_the_largest_number_infinity_passes_and_nothing_else(truth):
    largest = torch.finfo(torch.float32).max
    assert against_itself([1.0, math.inf], [1.0, truth]).passed
    assert against_itself([1.0, largest], [1.0, truth]).passed == (truth < math.inf)
    assert against_itself([1.0, -math.inf], [1.0, -truth]).passed
    for wrong in (-math.inf, math.nan, 0.0, 1e38):
        assert not against_itself([1.0, wrong], [1.0, truth]).passed


def test_an_infinite_reference_gives_no_budget():
    truth = torch.ones(2, dtype=torch.float64)
    assert not verdict(torch.tensor([1.0, 1.1]), torch.tensor([math.inf, 1.0]), truth).passed


def test_where_truth_and_reference_are_not_a_number_the_candidate_must_not_be_one():
    assert against_itself([1.0, math.nan], [1.0, math.nan]).passed
    assert not against_itself([2.0, math.nan], [1.0, math.nan]).passed
    for wrong in (5.0, math.inf, -math.inf):
        error_check = against_itself([1.0, wrong], [1.0, math.nan])
        assert not error_check.passed
        assert error_check.message == f"has 1 numbers where the truth is NaN (the first is {wrong:.6g})"
    assert against_itself([1.0, -math.inf], [1.0, -math.inf]).passed
    error_check = against_itself([1.0, 3.0], [1.0, -math.inf])
    assert error_check.message == "is not infinite in 1 elements where the truth is (got 3, truth -inf)"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_finite_numbers_are_judged_alike_beside_what_is_no_number(dtype):
    """Where all are finite no masks are made. Of 70,000, float16 has its largest number: the truth is cut off there."""
    torch.manual_seed(0)
    truth = torch.cat((torch.randn(50, dtype=torch.float64), torch.tensor([0.0, 7e4, -7e4])))
    rounded = truth.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    nan = torch.full((1,), math.nan, dtype=torch.float64)
    for candidate in (rounded, rounded / 1.1, -rounded):
        three = (candidate, rounded, truth)
        found = verdict(*three)
        assert found == verdict(*(torch.cat((each, nan.to(each.dtype))) for each in three))
        assert found.passed == (candidate is rounded)


def test_where_the_reference_overflowed_nan_of_the_truth_asks_nothing():
    truth = torch.tensor([1.0, math.nan], dtype=torch.float64)
    for reference in (5.0, math.inf):
        assert verdict(torch.tensor([1.0, 5.0]), torch.tensor([1.0, reference]), truth).passed


def test_of_a_gradient_infinity_is_as_good_as_nan_and_a_number_is_not():
    """In another order of its products infinities need not meet."""
    y, nan = torch.ones(1), torch.full((1,), math.nan)
    for found, passed in ((math.nan, True), (math.inf, True), (0.0, False)):
        runs = [Run((y.to(g.dtype),), {"x": g}) for g in (torch.tensor([found]), nan, nan.double())]
        assert [j.passed for j in judge(*runs)] == [True, passed]


def test_around_zero_only_the_smallest_number_is_allowed():
    assert against_itself([1e-45], [0.0]).passed
    assert not against_itself([3e-45], [0.0]).passed


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (torch.zeros(3), "is (3,) torch.float32, the reference's is (2,) torch.float32"),
        (torch.zeros(1, 2), "is (1, 2) torch.float32"),
        (torch.zeros(2, dtype=torch.float16), "is (2,) torch.float16, the reference's is (2,) torch.float32"),
    ],
)
def test_shape_and_dtype_are_those_of_the_reference(candidate, message):
    error_check = verdict(candidate, torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not error_check.passed
    assert error_check.message.startswith(message)


def test_empty_outputs_are_right():
    assert verdict(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.float64)).passed


def test_missing_and_extra_gradients_are_found():
    y, exact = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    reference, truth = Run((y,), {"x": y, "mask": None}), Run((exact,), {"x": exact, "mask": None})
    verdicts = {j.quantity: j.message for j in judge(Run((y,), {"x": None, "mask": y}), reference, truth)}
    assert verdicts == {
        "output": "",
        "gradient of x": "is missing (None)",
        "gradient of mask": "is not None, the reference's is",
    }
    assert all(j.passed for j in judge(reference, reference, truth))


def test_the_number_of_outputs_is_that_of_the_reference():
    y, exact = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    (error_check,) = judge(Run((y, y), {}), Run((y,), {}), Run((exact,), {}))
    assert not error_check.passed
    assert error_check.message == "are 2, the reference has 1"


def of_a_mean(candidate, reference, truth, terms, true_terms):
    """Whether a candidate passes whose output is a mean."""
    theirs, exact = (
        Run((torch.tensor(mean, dtype=dtype),), {}, terms=(torch.tensor(of, dtype=dtype),))
        for mean, of, dtype in ((reference, terms, torch.float32), (truth, true_terms, torch.float64))
    )
    (error_check,) = judge(Run((torch.tensor(candidate),), {}), theirs, exact)
    return error_check.passed


def test_a_mean_may_err_as_far_as_its_terms():
    """The reference happens to be right: that says nothing of what another order of summing up may give."""
    terms, true_terms = [1.001, 2.999], [1.0, 3.0]
    assert of_a_mean(2.0015, 2.0, 2.0, terms, true_terms)
    assert not of_a_mean(2.0025, 2.0, 2.0, terms, true_terms)
    assert not of_a_mean(2.0015, 2.0, 2.0, true_terms, true_terms)
    assert of_a_mean(2.0, 2.0, 2.0, [float("nan"), 3.0], true_terms)  # of terms without a number nothing is known
    assert not of_a_mean(2.0015, 2.0, 2.0, [float("nan"), 3.0], true_terms)


def test_the_terms_of_a_mean_say_nothing_of_gradients():
    half, zeros = torch.tensor(0.5), torch.zeros(2)
    reference = Run((torch.tensor(0.0),), {"x": zeros}, terms=(zeros,))
    truth = Run((torch.tensor(0.0).double(),), {"x": zeros.double()}, terms=(zeros.double() + 1.0,))
    found = judge(Run((half,), {"x": half.expand(2)}), reference, truth)
    assert {j.quantity: j.passed for j in found} == {"output": True, "gradient of x": False}


def test_outputs_are_counted_where_there_are_several():
    y = torch.zeros(2)
    assert list(Run((y, y), {"x": y}).quantities()) == ["output 0", "output 1", "gradient of x"]


def double_in_float64(x, weight, count):
    assert count == 2
    return x * weight + x.new_tensor(1.0)


def test_the_truth_is_the_function_in_float64():
    arguments = [torch.tensor([1.0, 3.0]), torch.tensor([0.1, 0.2]), 2]
    truth = run(double_in_float64, ["x", "weight", "count"], in_float64(arguments), [torch.ones(2).double()])
    assert truth.outputs[0].dtype is torch.float64
    assert list(truth.gradients) == ["x", "weight"]
    torch.testing.assert_close(truth.gradients["x"], arguments[1].double(), rtol=0, atol=0)
    assert truth.written == ()
    assert arguments[0].grad is None


def test_the_forward_alone_has_no_graph():
    outcome = run(torch.exp, ["x"], [torch.zeros(2)])
    assert outcome.gradients == {}
    assert not outcome.outputs[0].requires_grad


def test_a_copy_has_the_layout_of_the_argument_and_its_gaps():
    seen = []

    def function(x):
        seen.append((x.stride(), x.storage_offset(), x.as_strided((4, 7), (7, 1))[:, 3:].isnan().all().item()))
        return x * 2

    argument = packed_view(torch.ones(4, 3))
    incoming = packed_view(torch.ones(4, 3))
    run(function, ["x"], [argument], [incoming])
    assert seen[0] == ((7, 1), 0, True)
    assert argument.as_strided((4, 7), (7, 1))[:, 3:].isnan().all()


def one_by_one(terms, dtype=torch.float32):
    """Rows added in their order, every partial sum rounded to a dtype."""
    total = torch.zeros(terms.shape[1], dtype=dtype)
    for row in terms.to(dtype):
        total = total + row
    return total.to(terms.dtype)


SUMS = {
    "in the reference's order": lambda terms: terms.sum(0),
    "one by one": one_by_one,
    "one by one, from the end": lambda terms: one_by_one(terms.flip(0)),
    "without one row": lambda terms: terms[1:].sum(0),
    "one row twice": lambda terms: terms.sum(0) + terms[-1],
    "partial sums in bfloat16": lambda terms: one_by_one(terms, torch.bfloat16),
    "partial sums in float16": lambda terms: one_by_one(terms, torch.float16),
}


@pytest.mark.parametrize("rows", [8, 384, 4096, 32768])
@pytest.mark.parametrize("add", SUMS)
def test_the_order_of_a_sum_over_rows_is_free_and_its_terms_and_precision_are_not(add, rows):
    terms = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
    reference, exact = terms.sum(0), terms.double().sum(0)
    x = torch.zeros(rows, 64)
    runs = [Run((x,), {"weight": each}) for each in (SUMS[add](terms), reference)]
    summands = summands_by_shape([x], {"x": x, "weight": reference})
    assert summands == {"weight": rows}
    found = judge(*runs, Run((x.double(),), {"weight": exact}), 2.0, summands)
    right = add in list(SUMS)[:3]
    assert [j.passed for j in found] == [True, right], found[1]


def test_terms_are_counted_where_an_argument_is_broadcast():
    output, three = torch.zeros(5, 3, 4), torch.zeros(3, 4)
    arguments = {"x": output, "heads": three, "one": torch.zeros(1, 4), "other": torch.zeros(3), "eps": 1e-6}
    assert summands_by_shape([output], arguments) == {"heads": 5, "one": 15}


def test_a_miss_counts_if_fresh_inputs_miss_too():
    miss, worse, right = (ErrorCheck("output", ratio <= 1.0, error_over_budget=ratio) for ratio in (1.1, 1.5, 0.9))
    nan = ErrorCheck("gradient of x", False, error_over_budget=math.inf)
    assert confirm([miss], lambda: [right]) == [right]
    assert confirm([miss], lambda: [worse]) == [miss]
    assert confirm([miss], lambda: [nan]) == [miss], "another quantity says nothing of this one"
    assert confirm([nan], lambda: pytest.fail("no other inputs make NaN right")) == [nan]
    assert confirm([right], lambda: pytest.fail("nothing to confirm")) == [right]
