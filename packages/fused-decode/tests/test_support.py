"""What works with what: every cell of the support table, and the table itself."""

from pathlib import Path

import pytest

from kernel_pytorch.harness.pytest_plugin import support_cases
from kernel_pytorch.harness.support import problems

RESULTS = Path(__file__).parents[3] / "results"
RECORDS = sorted(RESULTS.glob("*/support/fused-decode.json"))


@pytest.mark.parametrize(("operation", "implementation", "row"), support_cases("fused-decode"))
def test_support(check_support, operation, implementation, row):
    check_support("fused-decode", operation, implementation, row)


@pytest.mark.skipif(not RECORDS, reason="not recorded yet; `kernel-pytorch support --json results/<device>` does it")
def test_the_table_is_what_was_recorded_of_these_sources():
    assert problems("fused-decode", RESULTS) == []
