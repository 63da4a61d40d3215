"""Where the device's time of a step goes: its kernels."""

from __future__ import annotations

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from kernel_pytorch.harness.models.works import Step
from kernel_pytorch.harness.records import Amount, Count, Part


class Kernel(Part):
    """The launches of one kernel in a step.

    Attributes:
        name: of the kernel.
        seconds: of all its launches.
        count: of launches.
    """

    name: str
    seconds: Amount
    count: Count


def profile(step: Step) -> list[Kernel]:
    """The kernels, copies and fills of a step, the longest first."""
    step()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
    found = [
        Kernel(name=event.key, seconds=event.self_device_time_total / 1e6, count=event.count)
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA and event.self_device_time_total > 0
    ]
    return sorted(found, key=lambda kernel: -kernel.seconds)
