"""The declaration: the numbered kernels behind the CUDA levels of other packages."""

from __future__ import annotations

from kernel_pytorch.cuda_ops.technique import rungs
from kernel_pytorch.cuda_ops.technique.kernels import CONTRACTS
from kernel_pytorch.harness.technique import Technique

HERE = "kernel_pytorch.cuda_ops"

technique = Technique(
    name="cuda-ops",
    title="CUDA C++ with a CPU backend: numbered kernels, each one idea ahead of the last",
    paper="https://docs.nvidia.com/cuda/parallel-thread-execution/",
    operations=rungs.operations,
    levels=f"{HERE}.levels",
    contracts=CONTRACTS,
)
