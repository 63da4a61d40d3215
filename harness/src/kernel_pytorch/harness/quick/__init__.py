"""Times, comparisons and memory of any function, from a line of Python.

    quick_benchmark(fn, *args)                        one function on the harness's clock
    compare_implementations({name: fn}, *args)        several, proven right and timed in turns
    compare_levels("technique.operation", case)       the levels of an installed technique
    profile_memory(fn, *args)                         what a call needs in memory, at most and over time
    scaling(make, sizes)                              how the cost grows with the size

Each returns a record with `.table()`, which `print` shows, and `.to_json()`; all but the first have `.plot(path)`.
"""

from kernel_pytorch.harness.quick.benchmark import profile_memory, quick_benchmark
from kernel_pytorch.harness.quick.comparison import compare_implementations
from kernel_pytorch.harness.quick.growth import Growth, Scaling, fit_growth, scaling
from kernel_pytorch.harness.quick.levels import compare_levels
from kernel_pytorch.harness.quick.records import Benchmark, Comparison, Contender, MemoryProfile

__all__ = [
    "Benchmark",
    "Comparison",
    "Contender",
    "Growth",
    "MemoryProfile",
    "Scaling",
    "compare_implementations",
    "compare_levels",
    "fit_growth",
    "profile_memory",
    "quick_benchmark",
    "scaling",
]
