"""`flash_attention` in one kernel; its gradient is computed by PyTorch, from scores that it computes again.

    o = softmax(scale * q k^T) v                              -inf where a query does not see a key

Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135; "FlashAttention-2", 2023,
https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from torch import Tensor

from ._core.operator import declare
from ._flash_attn_triton.cuda import FLASH_ATTENTION_RULES
from .arguments import check_tensor
from .operators import call

run_flash_attention = declare(**FLASH_ATTENTION_RULES)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False) -> Tensor:
    """Attend, without the matrix of scores in memory in the forward; differentiable any number of times.

    The backward computes the scores again and holds them: `(B, H, S, T)` in float32. For training on long sequences use
    kernel_pytorch.flash_attn_triton or `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        q: `(B, H, S, D)`, float16, bfloat16 or float32, on a CPU float64 too; D up to 256 on CUDA.
        k: `(B, K, T, D)`, K divides H; dtype and device of q.
        v: `(B, K, T, D)`; dtype and device of q.
        scale: of the scores; `D ** -0.5` for None.
        causal: whether query i sees keys up to i + T - S alone. The output of a query that sees none is zero.

    Returns:
        `(B, H, S, D)` in the dtype of q.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind, or the scale a bool, which was meant for `causal`.
        ValueError: the scale is not finite.
    """
    if isinstance(scale, bool):
        raise TypeError(f"flash_attention: scale: given {scale}; it is a number or None, and `causal` goes by name")
    if scale is None:
        check_tensor("flash_attention", "q", q)
        scale = max(q.shape[-1] if q.dim() else 1, 1) ** -0.5
    return call("flash_attention", run_flash_attention, q, k, v, scale, causal)[0]
