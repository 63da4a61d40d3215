"""cuda-ops for pytest-benchmark: `pytest packages/cuda-ops/benchmarks`."""

import pytest

from kernel_pytorch.harness.pytest_plugin import benchmark_jobs


@pytest.mark.parametrize(("job", "implementation"), benchmark_jobs("cuda-ops"))
def bench_cuda_ops(report_samples, job, implementation):
    report_samples(job, implementation)
