"""What the compiled code of the CUDA kernels of csrc/ promises."""

from __future__ import annotations

from kernel_pytorch.harness.contracts import KernelContract

# Every kernel promises no spills, but these. In bytes: ptxas keeps a value or two on the stack rather than lose a
# resident warp, here and there, by its version.
SPILLS = KernelContract(64)
CONTRACTS = {
    "rms_norm::forward_vectorized": SPILLS,
    "rms_norm::forward_ring": SPILLS,
    "rms_norm::backward_vectorized": SPILLS,
    "rms_norm::backward_ring": SPILLS,
    "norm_act::forward_vectorized": SPILLS,
    "norm_act::forward_ring": SPILLS,
    "norm_act::backward_vectorized": SPILLS,
    "norm_act::backward_ring": SPILLS,
    "norm_act::backward_block": SPILLS,
    "rotary_embedding::rotate_vectorized": SPILLS,
    "qk_norm_rope::norm_rope_vectorized": SPILLS,
    "qk_norm_rope::norm_rope_backward_block": SPILLS,
    # On sm_80 alone, eight vectors of float32 scores beside a mask of bools: 80 bytes.
    "softmax::forward_vectorized": KernelContract(80),
    "softmax::forward_ring": SPILLS,
    "bias_act::backward_shares": SPILLS,
    "bias_dropout_add::backward_shares": SPILLS,
}
