"""The public functions: arguments by keyword, checked before any kernel starts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .operations import (
    FLASH_ATTENTION,
    FLASH_ATTENTION_MASKED,
    FLASH_ATTENTION_VARLEN,
    FLASH_ATTENTION_WITH_LSE,
    FLASH_DECODE,
)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
    deterministic: bool = False,
    level: str | None = None,
) -> Tensor:
    """Scaled dot product attention, exact, without the matrix of scores in memory at levels "native" and "triton".

    Query i is at key position `i + Sk - Sq`: causal, window and ALiBi count from there, so the last query is at the
    position of the last key. Differentiable in q, k, v and sinks; twice at levels "reference", "torchscript", "cuda",
    and "native" where PyTorch's backend is.

    Args:
        q: `(B, H, Sq, D)`, float16, bfloat16, float32 or float64 (not at level "triton"), any strides: a view
            `x.transpose(1, 2)` of `(B, Sq, H, D)` is not copied. D at least 1, at most 256 at level "triton".
        k: `(B, Hkv, Sk, D)`, Hkv divides H: query head h reads head `h // (H / Hkv)`. Dtype and device of q.
        v: `(B, Hkv, Sk, D)`, dtype and device of q.
        causal: whether queries see no key behind their position.
        scale: of the scores; finite. None for `D ** -0.5`.
        window: `(left, right)`, how many keys before and behind its position a query sees; -1 or None for all.
        softcap: c makes `c * tanh(s / c)` of scaled scores s, before ALiBi; above 0. None for no soft cap.
        alibi_slopes: `(H,)` or `(B, H)`, any of these dtypes: `-slope * |i + Sk - Sq - j|` is added to the scores. No
            gradient. None for no ALiBi.
        sinks: `(H,)`, any of these dtypes: a logit in each head's softmax that has no value. None for no sinks.
        dropout_p: probability with which a weight becomes zero, from 0 to below 1; others are divided by
            `1 - dropout_p`.
        seed: int64 of shape `()` on the device of q, or an integer: the same seed drops the same weights at every
            level. None draws one. No use without dropout.
        deterministic: whether gradients must be the same bits each time. Level "native" cannot promise it on a GPU,
            unless `torch.use_deterministic_algorithms(True)` is set, and level "torchscript" nowhere; the other levels
            always do.
        level: None for the default (see the page of this package), or "reference", "native", "torchscript", "compile",
            "triton", "cuda".

    Returns:
        `(B, H, Sq, D)` in the dtype of q. A query that sees no key gets zeros, and gives gradients of zero.

    Raises:
        TypeError: an argument is not of its kind or dtype.
        ValueError: shapes, devices or values do not fit; the message names the argument.
        RuntimeError: the level asked for lacks a feature, or cannot run on this device or dtype.

    Saved for the backward at level "triton": q, k, v, the output, of 16 bits what rounding took off it too, and two
    float32 for each query and head: the maximum of its scores, and the sum of exponentials.

    Source: Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135; "FlashAttention-2", 2023,
    https://arxiv.org/abs/2307.08691.
    """
    options = causal, scale, window, softcap, alibi_slopes, sinks, dropout_p, seed, deterministic
    return FLASH_ATTENTION(q, k, v, *options, level)


def flash_attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
    deterministic: bool = False,
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`flash_attention`, and the logarithm of the sum of exponentials of each query's scores.

    Parts of a sequence can be combined by it: attention over more keys is the mean of two outputs, weighted by
    `exp(lse)`. Differentiable in both results.

    `q`, `k`, `v`, `causal`, `scale`, `window`, `softcap`, `alibi_slopes`, `sinks`, `seed` and `deterministic` are
    as in `flash_attention`.

    Args:
        dropout_p: as in `flash_attention`; lse is that of all weights.
        level: None, "reference", "torchscript", "compile" or "triton". None is "triton" on a GPU that it runs
            on, else "reference": PyTorch's attention does not return lse.

    Returns:
        The output, `(B, H, Sq, D)`; lse, `(B, H, Sq)`, float32 (float64 of float64), natural logarithm, the sink
        included; -inf where there is nothing to sum.

    Raises:
        TypeError, ValueError, RuntimeError: as `flash_attention`.
    """
    options = causal, scale, window, softcap, alibi_slopes, sinks, dropout_p, seed, deterministic
    return FLASH_ATTENTION_WITH_LSE(q, k, v, *options, level)


def flash_attention_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | int | None = None,
    deterministic: bool = False,
    level: str | None = None,
) -> Tensor:
    """`flash_attention` with an arbitrary mask or an additive bias, which gets a gradient.

    `q`, `k`, `v`, `scale`, `softcap`, `sinks`, `dropout_p`, `seed` and `deterministic` are as in
    `flash_attention`.

    Args:
        mask: `(B, H, Sq, Sk)`, or 1 in some of these dimensions, read where it lies: bool, False where a query does
            not see a key, or float16, bfloat16, float32 or float64, added to the scores after the soft cap.
        causal: as in `flash_attention`; beside the mask.
        window: as in `flash_attention`; beside the mask.
        level: as in `flash_attention`, but for "cuda".

    Returns:
        `(B, H, Sq, D)` in the dtype of q.

    Raises:
        TypeError, ValueError, RuntimeError: as `flash_attention`.

    The gradient of a bias takes memory for `(b, h, Sq, Sk)` in float32, where b and h are its own first dimensions.
    """
    options = causal, scale, window, softcap, sinks, dropout_p, seed, deterministic
    return FLASH_ATTENTION_MASKED(q, k, v, mask, *options, level)


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    level: str | None = None,
) -> Tensor:
    """`flash_attention` of sequences of any lengths, packed one behind the other without padding.

    `scale`, `softcap`, `alibi_slopes`, `sinks` and `deterministic` are as in `flash_attention`.

    Args:
        q: `(S, H, D)`, the queries of all sequences; dtypes as in `flash_attention`, any strides.
        k: `(T, Hkv, D)`, the keys of all sequences; Hkv divides H.
        v: `(T, Hkv, D)`.
        cu_seqlens_q: `(B + 1,)`, int32 or int64, on the device of q: where the queries of each sequence begin, and S.
            Sequences may be empty.
        cu_seqlens_k: `(B + 1,)`, as cu_seqlens_q: where the keys of each sequence begin, and T.
        max_seqlen_q: at least the queries of the longest sequence.
        max_seqlen_k: at least the keys of the longest sequence.
        causal: as in `flash_attention`, in each sequence.
        window: as in `flash_attention`, in each sequence.
        level: as in `flash_attention`, but for "cuda". All levels but "triton" compute, or mask, the scores of all
            queries with all keys.

    Returns:
        `(S, H, D)` in the dtype of q.

    Raises:
        TypeError, ValueError, RuntimeError: as `flash_attention`. The values of cu_seqlens are checked on a CPU alone.
    """
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options = causal, scale, window, softcap, alibi_slopes, sinks, deterministic
    # On a CPU the numbers in cu_seqlens are read, and the next call has others.
    is_read = not isinstance(cu_seqlens_q, Tensor) or cu_seqlens_q.is_cpu
    run = FLASH_ATTENTION_VARLEN.uncached if is_read else FLASH_ATTENTION_VARLEN
    return run(q, k, v, *sequences, *options, level)


def flash_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    level: str | None = None,
) -> Tensor:
    """`flash_attention` of the newest tokens of sequences to a cache of all their keys and values. No gradients.

    Query i of sequence b is at key position `cache_seqlens[b] - Sq + i`: the keys of the new tokens are in the cache
    already. Entries after the last valid key of a sequence do not affect the result, even if they are NaN.

    `scale`, `window`, `softcap`, `alibi_slopes` and `sinks` are as in `flash_attention`.

    Args:
        q: `(B, H, Sq, D)`, dtypes and strides as in `flash_attention`.
        k_cache: `(B, Hkv, S, D)`, where S is what there is room for, or with block_table pages
            `(num_blocks, Hkv, page_size, D)`, page_size at least 1. Hkv divides H. Any strides: a view
            `x.transpose(1, 2)` of `(B, S, Hkv, D)` or `(num_blocks, page_size, Hkv, D)` is not copied at level
            "triton". Dtype and device of q.
        v_cache: shape, dtype and device of k_cache; its own strides.
        cache_seqlens: `(B,)`, int32, on the device of q: how many keys of each sequence are valid, the new tokens
            included. Values are clamped to [0, S], never checked. A sequence of length 0 gives zeros.
        block_table: `(B, max_blocks)`, int32, on the device of q: which pages the keys of each sequence lie in, in
            order; S is `max_blocks * page_size`. Entries are clamped to [0, num_blocks), never checked; those behind
            the length do not matter. None for a cache without pages.
        causal: as in `flash_attention`. It changes nothing for one query of each sequence.
        level: as in `flash_attention`, but for "cuda". All levels but "triton" compute the scores of the whole cache,
            and copy it.

    Returns:
        `(B, H, Sq, D)` in the dtype of q, contiguous at level "triton".

    Raises:
        TypeError, ValueError, RuntimeError: as `flash_attention`.
        RuntimeError: gradients are enabled, and q, a cache or sinks requires one.

    Nothing of a call depends on values of cache_seqlens and block_table: it does not wait for the GPU, and a CUDA graph
    of it stays right while they change.

    Source: Dao et al., "Flash-Decoding", 2023, https://pytorch.org/blog/flash-decoding/; Kwon et al., "PagedAttention",
    2023, https://arxiv.org/abs/2309.06180.
    """
    options = causal, scale, window, softcap, alibi_slopes, sinks
    return FLASH_DECODE(q, k_cache, v_cache, cache_seqlens, block_table, *options, level)
