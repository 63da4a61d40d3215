"""The ladder, from the definition to CUDA C++, and which level is the default where."""

import torch

from kernel_pytorch.rmsnorm._core import cuda_level
from kernel_pytorch.rmsnorm._core.levels import Default, Ladder

LADDER = Ladder(
    dict.fromkeys(("rms_norm", "add_rms_norm", "head_rms_norm"), __name__),
    [
        Default("triton", record="nvidia-h200", capabilities=[(9, 0)], traced=False),
        Default("cuda", record="amd-epyc-2-threads", device="cpu", dtypes=[torch.bfloat16, torch.float32]),
    ],
    cuda_level,
    derived={"triton": {"head_rms_norm": "rms_norm"}},
)
