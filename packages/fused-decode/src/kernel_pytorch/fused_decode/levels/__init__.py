"""The ladder, from the definition to Triton, which level is the default where, and what each level lacks."""

import torch

from kernel_pytorch.fused_decode._core.levels import Default, Ladder

PRODUCTS = ("norm_linear", "norm_gated_linear", "linear_residual")
FLOAT64, HEAD_SIZE, STRIDED = "float64", "head size", "strided cache"

LADDER = Ladder(
    dict.fromkeys((*PRODUCTS, "rotary_cache_attention"), __name__),
    [
        # Native copies the cache into what it attends to: the kernel is there for that, measured or not.
        Default("triton", None, functions=["rotary_cache_attention"]),
        Default(
            "triton",
            "nvidia-h100-80gb-hbm3",
            functions=PRODUCTS,
            capabilities=[(9, 0)],
            traced=False,
            dtypes=[torch.bfloat16, torch.float16],
        ),
    ],
    cuda=None,
    lacks={
        "triton": {
            FLOAT64: "the Triton kernels take float16, bfloat16 and float32",
            HEAD_SIZE: "the Triton kernels take head sizes up to 256",
            STRIDED: "the Triton kernel writes into contiguous caches alone; give k_cache.contiguous(), and keep it",
        }
    },
)
