"""The CUDA kernels of csrc/: where their sources are, and what their compiled code promises."""

from __future__ import annotations

from pathlib import Path

from kernel_pytorch.harness.contracts import CudaUnit, KernelContract

CSRC = Path(__file__).resolve().parents[4] / "csrc"


def cuda_units() -> list[CudaUnit]:
    """One for every operator with CUDA kernels; none where the package is installed from a wheel."""
    include = (CSRC / "include",)
    return [CudaUnit(source, include, ("-std=c++17",)) for source in sorted(CSRC.glob("*/cuda.cu"))]


# Every kernel promises no spills. These promise accesses of 16 bytes too. Kernels that end rows element by element
# cannot: the end is most of their code.
WIDE = KernelContract(min_load_bits=128, min_store_bits=128)
WIDE_STORES = KernelContract(min_store_bits=128)  # a mask is read as it is: a byte or two an element
# In bytes: ptxas keeps a value or two on the stack rather than lose a resident warp, here and there, by its version.
PARKED = 64
PARKED_AND_WIDE = KernelContract(PARKED, min_load_bits=128, min_store_bits=128)
PARKED_AND_NARROW = KernelContract(PARKED, min_load_bits=64, min_store_bits=64)
CONTRACTS = {
    "rms_norm::forward_vectorized": PARKED_AND_WIDE,
    "rms_norm::forward_ring": PARKED_AND_WIDE,
    "rms_norm::backward_vectorized": PARKED_AND_WIDE,
    "rms_norm::backward_ring": PARKED_AND_WIDE,
    # Beside float32, tensors of 16 bits are read and written as they are: four elements, eight bytes.
    "norm_act::forward_vectorized": PARKED_AND_NARROW,
    "norm_act::forward_ring": PARKED_AND_NARROW,
    "norm_act::backward_vectorized": PARKED_AND_NARROW,
    "norm_act::backward_ring": PARKED_AND_NARROW,
    "norm_act::backward_block": KernelContract(PARKED),
    # Where half a rotation is no multiple of 16 bytes, 8 are read at a time.
    "rotary_embedding::rotate_vectorized": KernelContract(PARKED, min_load_bits=64, min_store_bits=64),
    "qk_norm_rope::norm_rope_vectorized": PARKED_AND_WIDE,
    # Its shares of dweight meet in shared memory, element by element.
    "qk_norm_rope::norm_rope_backward_vectorized": KernelContract(min_load_bits=128),
    "qk_norm_rope::norm_rope_backward_block": KernelContract(PARKED),
    # On sm_80 alone, eight vectors of float32 scores beside a mask of bools: 80 bytes.
    "softmax::forward_vectorized": KernelContract(80, min_store_bits=128),
    "softmax::forward_ring": KernelContract(PARKED, min_store_bits=128),
    "softmax::backward_vectorized": WIDE,
    "softmax::backward_ring": WIDE,
    "cross_entropy::backward_vectorized": WIDE_STORES,
    "bias_act::backward_shares": KernelContract(PARKED),
    "bias_dropout_add::backward_shares": KernelContract(PARKED),
    "flash_attention::forward_mma": KernelContract(
        min_load_bits=128, matrix_instructions=dict.fromkeys(("sm_80", "sm_90", "sm_100", "sm_120"), "mma")
    ),
}
