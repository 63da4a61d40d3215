"""Profiling of any module: time and memory by operator, as shares of the machine's measured limits."""

from kernel_pytorch.harness.profiling.profile import profile_module
from kernel_pytorch.harness.profiling.records import KernelUse, OperatorUse, PeakMemory, Profile

__all__ = ["KernelUse", "OperatorUse", "PeakMemory", "Profile", "profile_module"]
