"""A kernel is the default only where the results that its row names say that it is right and faster."""

from pathlib import Path

import pytest
import torch

from kernel_pytorch.flash_attn_triton.levels import LADDER
from kernel_pytorch.harness.results import load

RESULTS = Path(__file__).parents[3] / "results"


@pytest.mark.skipif(not RESULTS.is_dir(), reason="not a checkout")
def test_a_kernel_is_the_default_only_where_it_was_measured_right_and_fastest():
    assert LADDER.defaults
    for row in LADDER.defaults:
        measured = load(RESULTS / row.record / "flash-attn-triton.json").measurements
        found = [m for m in measured if m.operation in row.functions and m.implementation == row.level]
        assert found
        for m in found:
            assert m.status == "measured", m.reason
            assert m.comparisons["native"].verdict == "FASTER"


@pytest.mark.skipif(not RESULTS.is_dir(), reason="not a checkout")
def test_attention_that_loses_somewhere_is_no_default():
    """Level `triton` wins prefills and loses short sequences: which of them a call is, its rows would say."""
    measured = load(RESULTS / "nvidia-h200" / "flash-attn-triton.json").measurements
    found = [m for m in measured if (m.operation, m.implementation) == ("flash_attention", "triton")]
    assert {m.comparisons["native"].verdict for m in found} >= {"FASTER", "SLOWER"}
    assert not any("flash_attention" in (row.functions or ()) for row in LADDER.defaults)


def test_decoding_is_by_the_kernel_on_compute_capability_90(monkeypatch):
    from kernel_pytorch.flash_attn_triton._core import levels

    monkeypatch.setattr(levels, "compute_capability", lambda device: (9, 0))
    device = torch.device("cuda")
    found = {dtype: LADDER.default("flash_decode", device, dtype) for dtype in (torch.bfloat16, torch.float32)}
    assert found == {torch.bfloat16: "triton", torch.float32: "native"}
