"""The ladder, from the definition to CUDA C++, which level is the default where, and what each level lacks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernel_pytorch.flash_attn_triton._core import cuda_level
from kernel_pytorch.flash_attn_triton._core.levels import Default, Ladder

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)
H100 = "nvidia-h100-80gb-hbm3"

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

MASKED_FIRST = ("window", "softcap", "alibi_slopes", "sinks", "dropout_p", "deterministic")
"""What native computes with a mask tensor that it makes first, or not at all, whatever else it is given."""
WITHOUT_MASK = (CAUSAL_MASK, *MASKED_FIRST)
"""The same without a mask of the user's; with one, native adds the causal mask to it, which costs little beside it."""
ALWAYS = ("flash_attention_with_lse", "flash_attention_varlen", "flash_decode")
"""Functions that native computes with a mask tensor that it makes first, or not at all, whatever they are given."""


def _on_h100(
    level: str, dtypes: Sequence[torch.dtype], functions: Sequence[str], features: Sequence[str] | None = None
) -> Default:
    return Default(level, H100, functions=functions, features=features, capabilities=[(9, 0)], dtypes=dtypes)


LADDER = Ladder(
    dict.fromkeys(("flash_attention", "flash_attention_masked", *ALWAYS), __name__),
    # Where no row is about a call, it is native: attention without features, or beside a mask that the user made.
    [
        _on_h100("triton", FLOATS, ["flash_attention_varlen", "flash_decode"]),
        _on_h100("triton", HALF, ["flash_attention_with_lse"]),
        _on_h100("triton", [torch.float32], ["flash_attention"], ["window"]),
        _on_h100("triton", HALF, ["flash_attention"], [CAUSAL_MASK]),
        _on_h100("native", [torch.float32], ["flash_attention"], [CAUSAL_MASK]),  # its products of float32 are faster
        Default("triton", None, functions=ALWAYS),
        Default("triton", None, functions=["flash_attention"], features=WITHOUT_MASK),
        Default("triton", None, functions=["flash_attention_masked"], features=MASKED_FIRST),
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
