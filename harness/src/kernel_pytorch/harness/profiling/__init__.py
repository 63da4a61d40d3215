"""Where the time and the memory of any module go, operator by operator, against what the machine can do."""

from kernel_pytorch.harness.profiling.profile import profile_module
from kernel_pytorch.harness.profiling.records import KernelUse, MemoryTimeline, OperatorUse, Profile

__all__ = ["KernelUse", "MemoryTimeline", "OperatorUse", "Profile", "profile_module"]
