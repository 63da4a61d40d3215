"""fused-decode for pytest-benchmark: `pytest packages/fused-decode/benchmarks`."""

import pytest

from kernel_pytorch.harness.pytest_plugin import benchmark_jobs


@pytest.mark.parametrize(("job", "implementation"), benchmark_jobs("fused-decode"))
def bench_fused_decode(report_samples, job, implementation):
    report_samples(job, implementation)
