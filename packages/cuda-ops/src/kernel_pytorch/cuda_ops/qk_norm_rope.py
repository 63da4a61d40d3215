"""RMSNorm of every head of queries and keys, then rotary position embedding: one kernel for both, and its gradients.

    n = q / sqrt(mean(q^2) + eps) * (offset + weight)        the mean runs over the D columns of a head
    y1 = n1 * cos - n2 * sin,  y2 = n2 * cos + n1 * sin      for every pair (n1, n2) of a head

and the same of k. Henry et al., "Query-Key Normalization for Transformers", 2020, https://arxiv.org/abs/2010.04245.
"""

from __future__ import annotations

from torch import Tensor

from ._core.operator import declare
from ._qkv_fusion.norm_rope import BACKWARD_RULES, QK_NORM_ROPE_RULES
from .operators import call

run_qk_norm_rope_backward = declare(**BACKWARD_RULES)
run_qk_norm_rope = declare(**QK_NORM_ROPE_RULES, backward=run_qk_norm_rope_backward)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    interleaved: bool = False,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of every head of q and k, then rotary, in one pass; differentiable in q, k and weights any number of
    times.

    Computed in float32 (float64 for float64) and rounded once. Views of a packed projection are read in place.

    Args:
        q: `(..., S, H, D)`, float16, bfloat16 or float32, on a CPU float64 too.
        k: `(..., S, K, D)`, in the dtype and on the device of q.
        q_weight: `(D,)`, shared by the heads; any of these dtypes.
        k_weight: as q_weight.
        cos: `(S, R/2)`, or `(..., S, R/2)` with the leading dimensions of q; R at most D. No gradient goes to it.
        sin: as cos.
        eps: added to the mean square.
        interleaved: pairs are columns 2i and 2i + 1; else i and i + R/2.
        offset: added to the weights (1 for weights stored around zero, as Gemma's).

    Returns:
        q and k so treated, in their dtype, contiguous.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
        ValueError: a number is not finite, or eps negative.
    """
    arguments = (q, k, q_weight, k_weight, cos, sin, eps, interleaved, offset)
    q_out, k_out, _, _ = call("qk_norm_rope", run_qk_norm_rope, *arguments)
    return q_out, k_out
