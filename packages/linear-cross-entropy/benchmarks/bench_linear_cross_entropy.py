"""linear-cross-entropy for pytest-benchmark: `pytest packages/linear-cross-entropy/benchmarks`."""

import pytest

from kernel_pytorch.harness.pytest_plugin import benchmark_jobs


@pytest.mark.parametrize(("job", "implementation"), benchmark_jobs("linear-cross-entropy"))
def bench_linear_cross_entropy(report_samples, job, implementation):
    report_samples(job, implementation)
