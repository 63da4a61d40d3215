"""What works with what: every cell of the support table, and the table itself."""

from pathlib import Path

import pytest

from kernel_pytorch.harness.pytest_plugin import support_cases
from kernel_pytorch.harness.support import problems

RESULTS = Path(__file__).parents[3] / "results"


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "implementation", "row"), support_cases("qkv-fusion"))
def test_support(check_support, operation, implementation, row):
    check_support("qkv-fusion", operation, implementation, row)


@pytest.mark.skipif(not RESULTS.is_dir(), reason="not a checkout")
def test_the_table_is_what_was_recorded_of_these_sources():
    assert problems("qkv-fusion", RESULTS) == []
