"""The declaration: what this package offers the harness beyond the CUDA levels of other packages."""

from __future__ import annotations

from kernel_pytorch.cuda_ops.technique import attention, rungs
from kernel_pytorch.cuda_ops.technique.common import HERE
from kernel_pytorch.cuda_ops.technique.kernels import CONTRACTS
from kernel_pytorch.harness.technique import Technique

technique = Technique(
    name="cuda-ops",
    title="CUDA C++ with a CPU backend: numbered kernels, and attention",
    paper="https://arxiv.org/abs/2307.08691",
    operations=[*rungs.operations, *attention.operations],
    levels=f"{HERE}.levels",
    contracts=CONTRACTS,
    cuda_units=f"{HERE}.technique.kernels:cuda_units",
)
