"""The ladder, from the definition to CUDA C++, which level is the default where, and what each level lacks."""

from __future__ import annotations

import torch

from kernel_pytorch.flash_attn_triton._core import cuda_level
from kernel_pytorch.flash_attn_triton._core.levels import Default, Ladder

HALF = (torch.float16, torch.bfloat16)

CAUSAL_MASK = "causal mask tensor"
"""The feature of a causal call for which PyTorch's attention takes a mask tensor: it has another number of keys than of
queries, or a mask beside it."""

SAME_BITS = "deterministic=True"
"""The feature of a call that asks for the same bits each time, on any device."""

NO_FEATURE = "PyTorch's scaled_dot_product_attention has none"
NO_KERNEL = "the C++ kernel has none"
LACKS: dict[str, dict[str, str]] = {
    "native": {
        "softcap": NO_FEATURE,
        "alibi_slopes": NO_FEATURE,
        "sinks": NO_FEATURE,
        "dropout_p": "PyTorch's scaled_dot_product_attention draws a mask of its own, not that of `seed`",
        "lse": "PyTorch's scaled_dot_product_attention does not return it",
        "deterministic": "PyTorch's backward adds in any order on a GPU unless torch.use_deterministic_algorithms(True)"
        " is set",
    },
    "torchscript": {
        SAME_BITS: "TorchScript optimises the gradients after the first calls, and rounds them in another way then"
    },
    "cuda": dict.fromkeys(("window", "softcap", "alibi_slopes", "sinks", "dropout_p", "lse"), NO_KERNEL),
    "triton": {
        "float64": "the Triton kernels take float16, bfloat16 and float32",
        "head size": "the Triton kernels take head sizes up to 256",
    },
}
"""By level, the features that it lacks, and why."""

WITHOUT_MASK = ("window", CAUSAL_MASK, "softcap", "alibi_slopes", "sinks", "dropout_p", "deterministic")
"""What native computes with a mask tensor that it makes first, or not at all."""
ALWAYS = ("flash_attention_with_lse", "flash_attention_varlen", "flash_decode")
"""Functions that native computes with a mask tensor that it makes first, or not at all, whatever they are given."""
BY_FEATURE = ("flash_attention", "flash_attention_masked")

LADDER = Ladder(
    dict.fromkeys((*BY_FEATURE, *ALWAYS), __name__),
    # Where no row is about a call, it is native: attention without features, or beside a mask that the user made.
    [
        Default("triton", "nvidia-h200", functions=["flash_decode"], capabilities=[(9, 0)], dtypes=HALF),
        Default("triton", "nvidia-h200", functions=["flash_attention_with_lse"], capabilities=[(9, 0)], dtypes=HALF),
        Default("triton", None, functions=ALWAYS),
        Default("triton", None, functions=BY_FEATURE, features=WITHOUT_MASK),
    ],
    cuda_level,
    absent={
        "flash_attention_with_lse": ("native", "cuda"),
        "flash_attention_masked": ("cuda",),
        "flash_attention_varlen": ("cuda",),
        "flash_decode": ("cuda",),
    },
    lacks=LACKS,
)


def gradient_is_unordered(device: torch.device) -> bool:
    """Whether PyTorch's attention may add gradients in any order there."""
    return device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
