"""Techniques of CUDA kernels alone: one that keeps its contracts, one that is wrong on purpose, one without sources."""

from pathlib import Path

from kernel_pytorch.harness.contracts import CudaUnit, KernelContract
from kernel_pytorch.harness.technique import Technique

HERE = Path(__file__).parent
WIDE = KernelContract(min_load_bits=128, min_store_bits=128)


def good_units():
    return [CudaUnit(HERE / "good.cu", include=(HERE / "include",), options=("-std=c++17",))]


def wrong_units():
    names = ("spilling", "promoting", "narrow", "rounding", "product", "hoarding", "broken", "empty")
    return [CudaUnit(HERE / f"{name}.cu") for name in names]


def no_units():
    return []


def technique(name, units, contracts):
    return Technique(
        name, name, "", [], "planted_cuda", contracts=contracts, cuda_units=f"planted_cuda.techniques:{units}"
    )


good = technique(
    "good",
    "good_units",
    {
        "scale_kernel": WIDE,
        "scale_kernel<*, 1>": KernelContract(max_registers=16),
        "product_kernel": KernelContract(
            min_load_bits=128, matrix_instructions={"sm_80": "mma", "sm_90": "wgmma", "sm_100": "mma", "sm_120": "mma"}
        ),
    },
)
wrong = technique(
    "wrong",
    "wrong_units",
    {
        "narrow_kernel": WIDE,
        "product_kernel": KernelContract(matrix_instructions={"sm_80": "mma", "sm_90": "wgmma"}),
        "unbounded_kernel": KernelContract(max_registers=4),
    },
)
absent = technique("absent", "no_units", {"scale_kernel": WIDE})
lost = technique("lost", "there_is_no_such_function", {})
