"""fused-ln-act for pytest-benchmark: `pytest packages/fused-ln-act/benchmarks`."""

import pytest

from kernel_pytorch.harness.pytest_plugin import benchmark_jobs

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("job", "implementation"), benchmark_jobs("fused-ln-act"))
def bench_fused_ln_act(report_samples, job, implementation):
    report_samples(job, implementation)
