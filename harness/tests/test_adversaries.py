"""Each adversary does what its name says, in every dtype, and leaves its argument alone."""

from __future__ import annotations

import pytest
import torch

from kernel_pytorch.harness.adversaries import (
    ADVERSARIES,
    LAYOUTS,
    NOT_FINITE,
    OFFSET,
    OUTLIER,
    common_offset,
    denormals,
    infinities,
    large_mean,
    not_a_number,
    outlier_channels,
    packed_view,
    strided_view,
    tiny,
    without_offset,
    zero_rows,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(params=DTYPES, ids=str)
def x(request):
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).to(request.param)


@pytest.mark.parametrize("adversary", ADVERSARIES.values(), ids=ADVERSARIES)
def test_shape_dtype_and_argument_stay_and_all_is_finite(adversary, x):
    before = x.clone()
    planted = adversary(x)
    assert planted.shape == x.shape
    assert planted.dtype == x.dtype
    assert planted.isfinite().all() == (adversary not in [ADVERSARIES[name] for name in NOT_FINITE])
    assert torch.equal(x, before)


def test_outliers_are_in_every_seventh_channel(x):
    planted = outlier_channels(x).double()
    limit = torch.finfo(x.dtype).max / 2
    torch.testing.assert_close(
        planted[:, ::7], (x[:, ::7].double() * OUTLIER).clamp(-limit, limit), rtol=torch.finfo(x.dtype).eps, atol=0
    )
    others = [channel for channel in range(32) if channel % 7]
    assert torch.equal(planted[:, others], x[:, others].double())


def test_outliers_stay_finite_where_the_dtype_ends():
    planted = outlier_channels(torch.full((2, 8), 100.0, dtype=torch.float16))
    assert planted[:, ::7].eq(torch.finfo(torch.float16).max / 2).all()


def test_the_mean_is_large(x):
    planted = large_mean(x).double()
    assert (planted - OUTLIER).abs().max() < 4 + OUTLIER * torch.finfo(x.dtype).eps


def test_every_second_row_is_zero(x):
    planted = zero_rows(x)
    assert not planted[::2].any()
    assert torch.equal(planted[1::2], x[1::2])


def test_denormals_are_below_the_smallest_normal_number_and_not_zero(x):
    planted = denormals(x).double().abs()
    assert planted.max() < torch.finfo(x.dtype).tiny
    assert planted.count_nonzero() > 0.9 * planted.numel()


def test_tiny_numbers_are_around_a_millionth(x):
    planted = tiny(x).double()
    torch.testing.assert_close(planted, x.double() * 1e-6, rtol=torch.finfo(x.dtype).eps, atol=2**-25)
    assert planted.any()


def test_a_common_offset_is_that_of_its_row_and_can_be_undone(x):
    planted = common_offset(x)
    step = OFFSET * torch.finfo(x.dtype).eps
    torch.testing.assert_close(planted[::2].double() - OFFSET, x[::2].double(), rtol=0, atol=step)
    torch.testing.assert_close(planted[1::2].double() + OFFSET, x[1::2].double(), rtol=0, atol=step)
    centred = without_offset(planted)
    assert torch.equal(common_offset(centred), planted)
    assert torch.equal(centred.double().diff(), planted.double().diff()), "no difference is rounded"


def test_one_nan_is_in_every_third_row_and_the_others_are_clean(x):
    planted = not_a_number(x)
    assert planted.isnan().sum(1).tolist() == [0, 1, 0, 0, 1, 0]
    assert torch.equal(planted[~planted.isnan()], x[~planted.isnan()])
    assert planted.isnan().any(0).sum() == 2, "at other columns, so that sums over rows have numbers left"


def test_infinities_of_both_signs_are_in_rows_of_their_own(x):
    planted = infinities(x)
    assert planted.eq(float("inf")).sum(1).tolist() == [0, 1, 0, 0, 0, 1]
    assert planted.eq(-float("inf")).sum(1).tolist() == [0, 0, 1, 0, 0, 0]
    assert torch.equal(planted[planted.isfinite()], x[planted.isfinite()])


@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (2, 1), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("adversary", ADVERSARIES.values(), ids=ADVERSARIES)
def test_any_shape_will_do(adversary, shape):
    assert adversary(torch.ones(shape)).shape == shape


def test_a_strided_view_has_stride_two_and_gaps_of_nan(x):
    planted = strided_view(x)
    assert planted.stride() == (64, 2)
    assert torch.equal(planted, x)
    assert planted.as_strided((6, 32), (64, 2), 1).isnan().all()


def test_a_packed_view_is_a_slice_of_wider_rows(x):
    planted = packed_view(x)
    assert planted.stride() == (65, 1)
    assert torch.equal(planted, x)
    assert planted.as_strided((6, 33), (65, 1), 32).isnan().all()


def test_layouts_are_the_adversaries_that_change_no_value(x):
    unchanged = [name for name, adversary in ADVERSARIES.items() if torch.equal(adversary(x), x)]
    assert tuple(unchanged) == LAYOUTS
