"""The ladders of all groups, and which level is the default where."""

from __future__ import annotations

import torch

from ._core import cuda_level
from ._core.levels import Default, Ladder

NORM_ACT = ("layer_norm_act", "add_layer_norm_act", "rms_norm_act", "add_rms_norm_act")
NORM = ("layer_norm", "add_layer_norm", *NORM_ACT)
GATED = ("swiglu", "geglu", "reglu")
BIAS = ("bias_act", "bias_dropout_add")
SOFTMAX = ("softmax",)
LINEAR = ("linear_act", "gated_mlp")

GROUPS = {"norm": NORM, "gated": GATED, "bias": BIAS, "softmax": SOFTMAX, "linear": LINEAR}
"""The functions of each group. The levels of a group are the modules in `<group>/levels`."""

HALF = (torch.float16, torch.bfloat16)
HOPPER = [(9, 0)]
ON_CPU = (torch.bfloat16, torch.float32)

LADDER = Ladder(
    {function: f"{__package__}.{group}.levels" for group, functions in GROUPS.items() for function in functions},
    [
        Default("triton", "nvidia-h200", functions=(*NORM, *GATED, *BIAS), capabilities=HOPPER, traced=False),
        Default("cuda", "nvidia-h200", functions=SOFTMAX, capabilities=HOPPER),
        # Products of float32 and float64 are no work for tensor cores. bfloat16 was measured; float16 is as many bytes
        # and the same instructions.
        Default("triton", "nvidia-h200", functions=LINEAR, capabilities=HOPPER, dtypes=HALF),
        # The CPU backend of the CUDA kernels, which has no advantage in LayerNorm alone.
        Default("cuda", "amd-epyc-2-threads", "cpu", functions=(*NORM_ACT, *GATED, *BIAS, *SOFTMAX), dtypes=ON_CPU),
    ],
    cuda_level,
    absent=dict.fromkeys(LINEAR, ("cuda",)),
    # A user would compile PyTorch's operators, not the definition, which multiplies in float32: no tensor core does
    # that exactly.
    derived={"compile": dict.fromkeys(LINEAR, "native")},
)
