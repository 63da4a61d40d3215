"""flash-attn-triton for pytest-benchmark: `pytest packages/flash-attn-triton/benchmarks`."""

import pytest

from kernel_pytorch.harness.pytest_plugin import benchmark_jobs


@pytest.mark.parametrize(("job", "implementation"), benchmark_jobs("flash-attn-triton"))
def bench_flash_attn_triton(report_samples, job, implementation):
    report_samples(job, implementation)
