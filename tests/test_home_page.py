"""What the home page shows of the measured models."""

import importlib.util
import re
from pathlib import Path

import pytest

from kernel_pytorch.harness.models.record import FILE, load

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def page():
    spec = importlib.util.spec_from_file_location("home_page", ROOT / "docs" / "home_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bars_are_those_of_the_record(page):
    record = load(ROOT / "results" / "nvidia-h100-80gb-hbm3" / FILE)
    found = re.findall(r'bar-([\w-]+)" style="width: ([\d.]+)%">[^<]* ([\d.]+)x<', page.bars(record))
    rows = [(row.variant, row.ratio) for run in record.runs.values() for row in run.rows if row.variant in page.SHOWN]
    assert sorted((name, ratio) for name, _, ratio in found) == sorted((n, f"{r.median:.2f}") for n, r in rows if r)
    longest = max(float(ratio) for _, _, ratio in found)
    assert all(abs(float(width) - 100 * float(ratio) / longest) < 0.5 for _, width, ratio in found)
    assert "| Llama" in page.measured([record])


def test_without_a_record_the_page_says_so(page):
    assert page.measured([]) == "Not measured yet: `nox -s models` does it."
