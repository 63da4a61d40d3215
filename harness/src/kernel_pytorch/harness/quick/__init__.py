"""Times, comparisons and memory of any function, from a line of Python.

    quick_benchmark(fn, *args)                        one function on the harness's clock
    compare_implementations({name: fn}, *args)        several, checked and timed in turns
    compare_levels("technique.operation", case)       the levels of an installed technique
    profile_memory(fn, *args)                         the memory that a call needs
    scaling(make, sizes)                              how the time grows with the size

Each returns a record with `.table()`, which `print` shows, and `.to_json()`.
"""

from kernel_pytorch.harness.quick.comparison import compare_implementations, compare_levels, quick_benchmark
from kernel_pytorch.harness.quick.growth import Growth, Scaling, fit_growth, scaling
from kernel_pytorch.harness.quick.memory import MemoryProfile, profile_memory
from kernel_pytorch.harness.quick.records import Benchmark, Comparison, Contender

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
