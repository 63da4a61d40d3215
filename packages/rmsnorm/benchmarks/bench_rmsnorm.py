"""rmsnorm for pytest-benchmark: `pytest packages/rmsnorm/benchmarks`."""

import pytest

from kernel_pytorch.harness.pytest_plugin import benchmark_jobs


@pytest.mark.parametrize(("job", "implementation"), benchmark_jobs("rmsnorm"))
def bench_rmsnorm(report_samples, job, implementation):
    report_samples(job, implementation)
