"""The ladder, from the definition to CUDA C++, which level is the default where, and what each level lacks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.flash_attn_triton._core import cuda_level
from kernel_pytorch.flash_attn_triton._core.call_kinds import is_transformed
from kernel_pytorch.flash_attn_triton._core.levels import Default, Ladder

FUNCTIONS = (
    "flash_attention",
    "flash_attention_with_lse",
    "flash_attention_masked",
    "flash_attention_varlen",
    "flash_decode",
)
HALF = (torch.float16, torch.bfloat16)
LADDER = Ladder(
    dict.fromkeys(FUNCTIONS, __name__),
    # Attention of as many queries as keys is faster in Gluon from some length on, below that slower: it stays native.
    [Default("triton", record="nvidia-h200", functions=["flash_decode"], capabilities=[(9, 0)], dtypes=HALF)],
    cuda_level,
    absent={
        "flash_attention_with_lse": ("native", "cuda"),
        "flash_attention_masked": ("cuda",),
        "flash_attention_varlen": ("cuda",),
        "flash_decode": ("cuda",),
    },
)

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
    "cuda": dict.fromkeys(("window", "softcap", "alibi_slopes", "sinks", "dropout_p", "lse"), NO_KERNEL),
    "triton": {
        "float64": "the Triton kernels take float16, bfloat16 and float32",
        "head size": "the Triton kernels take head sizes up to 256",
    },
}
"""By level, the features that it lacks, and why."""


def select(function: str, level: str | None, features: Collection[str], *tensors: Tensor | None) -> Callable[..., Any]:
    """The function of the level, the default one for None.

    The default is that of `LADDER`. Where that lacks a feature it is "triton" on a GPU that Triton's kernels run
    on, and "reference" elsewhere.

    Args:
        function: a name of `LADDER`.
        level: as the user gave it.
        features: that the call uses, by the names in `LACKS`.
        tensors: as in `Ladder.resolve`.

    Raises:
        ValueError: no such level, or not of this function.
        RuntimeError: the level lacks a feature, or cannot run on this device or dtype.
    """
    LADDER.check(level)
    if level is None:
        level = default(function, features, *tensors)
    for feature in features:
        reason = LACKS.get(level, {}).get(feature)
        if reason is not None:
            raise RuntimeError(f"level {level!r} of {function} cannot run here: {feature}: {reason}")
    return LADDER.resolve(function, level, *tensors)


def default(function: str, features: Collection[str], *tensors: Tensor | None) -> str:
    """The name of that level; arguments as in `select`."""
    level = LADDER.chosen(function, None, *tensors)
    if not any(feature in LACKS.get(level, {}) for feature in features):
        return level
    x = tensors[0]
    assert x is not None
    on_gpu = x.device.type == "cuda" and LADDER.unavailable("triton", x.device, x.dtype) is None
    if on_gpu and not is_transformed() and not any(feature in LACKS["triton"] for feature in features):
        return "triton"
    return "reference"


def gradient_is_unordered(device: torch.device) -> bool:
    """Whether PyTorch's attention may add gradients in any order there."""
    return device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
