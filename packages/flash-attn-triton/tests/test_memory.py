"""Peak memory: no level that is a default holds the matrix of scores."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

PEAK = """
    import torch
    from kernel_pytorch.flash_attn_triton import flash_attention
    torch.set_num_threads(1)
    def peak():
        # Not getrusage, which begins with the peak of the process that started this one.
        return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    def call(length):
        q, k, v = (torch.randn(1, 16, length, 64) for _ in range(3))
        return q, k, v, flash_attention(q, k, v, causal=True, level=LEVEL)
    call(64)
    before = peak()
    tensors = call(LENGTH)
    needed = sum(t.numel() * t.element_size() for t in tensors)
    print((peak() - before) / needed)
"""


def peak(level, length):
    program = textwrap.dedent(PEAK).replace("LEVEL", repr(level)).replace("LENGTH", str(length))
    return float(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_the_default_holds_no_scores():
    assert peak(None, 16384) < 1.2


def test_the_definition_does():
    """The measurement would see it."""
    assert peak("reference", 1024) > 10
