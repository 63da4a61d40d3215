"""my-technique for pytest-benchmark: `pytest packages/my-technique/benchmarks`."""

import pytest

from kernel_pytorch.harness.pytest_plugin import benchmark_jobs


@pytest.mark.parametrize(("job", "implementation"), benchmark_jobs("my-technique"))
def bench_my_technique(report_samples, job, implementation):
    report_samples(job, implementation)
