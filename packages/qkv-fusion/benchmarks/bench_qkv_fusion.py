"""qkv-fusion for pytest-benchmark: `pytest packages/qkv-fusion/benchmarks`."""

import pytest

from kernel_pytorch.harness.pytest_plugin import benchmark_jobs


@pytest.mark.parametrize(("job", "implementation"), benchmark_jobs("qkv-fusion"))
def bench_qkv_fusion(report_samples, job, implementation):
    report_samples(job, implementation)
