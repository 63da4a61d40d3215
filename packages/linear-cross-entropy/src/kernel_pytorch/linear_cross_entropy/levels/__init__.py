"""The ladder, from the definition to CUDA C++, and which level is the default where."""

import torch

from kernel_pytorch.linear_cross_entropy._core import cuda_level
from kernel_pytorch.linear_cross_entropy._core.levels import Default, Ladder

LOGITS = ("cross_entropy",)
HALF = (torch.float16, torch.bfloat16)

LADDER = Ladder(
    dict.fromkeys(("linear_cross_entropy", "cross_entropy"), __name__),
    [
        Default("triton", record="nvidia-h200", functions=LOGITS, capabilities=[(9, 0)]),
        Default("triton", record="nvidia-h200", functions=["linear_cross_entropy"], capabilities=[(9, 0)], dtypes=HALF),
        Default(
            "cuda", record="amd-epyc-2-threads", device="cpu", functions=LOGITS, dtypes=[torch.bfloat16, torch.float32]
        ),
    ],
    cuda_level,
    absent={"linear_cross_entropy": ("cuda",)},
)
