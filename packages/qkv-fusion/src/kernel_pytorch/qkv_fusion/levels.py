"""The ladders of all functions, and which level is the default where."""

from __future__ import annotations

import torch

from ._core import cuda_level
from ._core.levels import Default, Ladder

FOLDERS = {
    "rotary_embedding": "rotary",
    "qk_norm_rope": "norm_rope",
    "qk_layer_norm_rope": "norm_rope",
    "qkv_projection": "projection",
    "qkv_norm_rope": "projection",
}
"""By function, the folder whose `levels` has it."""

WITH_NORM = ("qk_norm_rope", "qkv_norm_rope")

LADDER = Ladder(
    {function: f"{__package__}.{folder}.levels" for function, folder in FOLDERS.items()},
    [
        Default("cuda", "nvidia-h200", functions=WITH_NORM, capabilities=[(9, 0)], traced=False),
        # Where cuda-ops is not installed, of all; the rotation was measured in models too (models.json).
        Default("triton", "nvidia-h200", functions=["rotary_embedding"], capabilities=[(9, 0)], traced=False),
        Default(
            "triton",
            "nvidia-h100-80gb-hbm3",
            functions=[*WITH_NORM, "qk_layer_norm_rope"],
            capabilities=[(9, 0)],
            traced=False,
        ),
        # The CPU backend of the CUDA kernels.
        Default(
            "cuda",
            "amd-epyc-2-threads",
            "cpu",
            functions=["rotary_embedding", "qk_norm_rope"],
            dtypes=[torch.bfloat16, torch.float32],
        ),
        Default("cuda", "amd-epyc-2-threads", "cpu", functions=["qkv_norm_rope"], dtypes=[torch.bfloat16]),
    ],
    cuda_level,
    absent={
        # For the norms TorchScript saves tensors for a gradient in inference mode too, where that is an error.
        "qk_norm_rope": ("torchscript",),
        "qkv_norm_rope": ("torchscript",),
        "qk_layer_norm_rope": ("torchscript", "cuda"),
        "qkv_projection": ("triton", "cuda"),
    },
    derived={"cuda": {"rotary_embedding": "rotary_qk"}},
)
