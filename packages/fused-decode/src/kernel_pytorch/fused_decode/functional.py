"""The public functions: arguments by keyword, checked before any kernel starts."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ._core.arguments import check_choice
from ._core.operation import Operation, Prepared
from .arguments import (
    ACTIVATIONS,
    check_dtypes,
    check_heads,
    check_no_gradient,
    check_norm,
    check_options,
    check_places,
    check_product,
)
from .levels import FLOAT64, HEAD_SIZE, LADDER, STRIDED

Norm = Literal["rms", "layer"]
Activation = Literal["silu", "gelu", "gelu_tanh"]


def norm_linear(
    x: Tensor, weight: Tensor, norm_weight: Tensor, bias: Tensor | None = None, *, norm: Norm = "rms",
    norm_bias: Tensor | None = None, norm_offset: float = 0.0, eps: float = 1e-6, level: str | None = None,
) -> Tensor:  # fmt: skip
    """A linear layer of the norm of few rows: `norm(x) @ weight.T + bias`. No gradients.

    At level "triton" one kernel reads the weight once, and the norm costs no launch. Under autocast x, weight and bias
    are cast as `torch.nn.functional.linear` casts them.

    Args:
        x: `(..., K)`, float16, bfloat16, float32 or float64 (not at level "triton"), at most 16 rows in all.
        weight: `(N, K)` in the dtype of x, as `torch.nn.Linear` has it.
        norm_weight: `(K,)`, any of these dtypes.
        bias: `(N,)` in the dtype of x; None for none.
        norm: "rms", `x / sqrt(mean(x^2) + eps) * (norm_offset + norm_weight)`, or "layer", the same of `x - mean(x)`,
            plus norm_bias.
        norm_bias: `(K,)`, any of these dtypes; of norm "layer" alone. None for none.
        norm_offset: added to norm_weight: 1 for Gemma.
        eps: added to the mean of the squares; not negative.
        level: None for the default of this device, or "reference", "native", "torchscript", "compile", "triton".

    Returns:
        `(..., N)` in the dtype of x. Computed in float32 and rounded once (levels but "native", which rounds the norm).

    Raises:
        TypeError: an argument is not of its kind or dtype.
        ValueError: more than 16 rows; shapes, devices or values do not fit; the message names the argument.
        RuntimeError: gradients are enabled and a tensor requires one; the level asked for cannot run here.

    At levels "reference" and "triton" on a GPU the bits of a row do not depend on what the other rows hold; one or two
    rows are computed by another kernel than more, and may differ in rounding.
    """
    return NORM_LINEAR(x, weight, norm_weight, bias, norm, norm_bias, norm_offset, eps, level)


def norm_gated_linear(
    x: Tensor, weight: Tensor, norm_weight: Tensor, bias: Tensor | None = None, *, activation: Activation = "silu",
    norm: Norm = "rms", norm_bias: Tensor | None = None, norm_offset: float = 0.0, eps: float = 1e-6,
    level: str | None = None,
) -> Tensor:  # fmt: skip
    """A gated linear layer of the norm of few rows: `act(n @ gate.T) * (n @ up.T)`, where n is norm(x). No gradients.

    `x`, `norm_weight`, `norm`, `norm_bias`, `norm_offset`, `eps` and `level` are as in `norm_linear`, and so are the
    errors and autocast.

    Args:
        weight: `(2 N, K)` in the dtype of x: the rows of the gate, then those of up.
        bias: `(2 N,)` in the dtype of x; None for none.
        activation: of the gate: "silu" (SwiGLU), "gelu" or "gelu_tanh" (GeGLU).

    Returns:
        `(..., N)` in the dtype of x.

    Raises:
        TypeError, ValueError, RuntimeError: as `norm_linear`.
    """
    return NORM_GATED_LINEAR(x, weight, norm_weight, bias, activation, norm, norm_bias, norm_offset, eps, level)


def linear_residual(
    x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None, *, level: str | None = None
) -> Tensor:
    """A linear layer of few rows and the residual sum behind it: `residual + x @ weight.T + bias`. No gradients.

    `x`, `weight`, `bias` and `level` are as in `norm_linear`, and so are the errors. Under autocast the residual is
    cast too.

    Args:
        residual: `(..., N)` in the dtype of x; it is not written into.

    Returns:
        `(..., N)` in the dtype of x.

    Raises:
        TypeError, ValueError, RuntimeError: as `norm_linear`.
    """
    return LINEAR_RESIDUAL(x, weight, residual, bias, level)


def rotary_cache_attention(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int,
    scale: float | None = None, window: int | None = None, softcap: float | None = None, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, norm_offset: float = 0.0, eps: float = 1e-6, sinks: Tensor | None = None,
    block_table: Tensor | None = None, level: str | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one new token of each sequence to its cache, into which its key and value are written. No gradients.

    q and k are normalised (with q_norm and k_norm) and rotated, k and v written, and all keys attended to that the
    token sees. The caches change in place, at every level.

    Args:
        qkv: `(rows, (H + 2 HK) D)`, at most 16 rows, dtypes as in `norm_linear`: heads of q, of k, of v. HK divides H;
            D is at most 256 at level "triton".
        k_cache: `(rows, HK, L, D)` with L slots for each row, or with block_table pages `(n, HK, page, D)`. Dtype and
            device of qkv; contiguous at level "triton". Slots that hold no key may hold anything, also NaN.
        v_cache: shape, dtype and device of k_cache. The two must not share memory; views that
            overlap are not noticed.
        lengths: `(rows,)`, int32: tokens in the cache, which is the position of the new one. A row whose number is
            negative is inactive: it writes nothing, and its result is 0. So is one beyond the positions of cos, or
            without a window beyond the last slot. Values are never checked.
        cos: `(positions, r / 2)`, float32 (beside float64 also that), r at most D: of each position's angles. The first
            r columns of a head turn, column i with column `i + r / 2`, as in Hugging Face's models; the others stay.
        sin: `(positions, r / 2)`, as cos.
        num_heads: H.
        scale: of the scores; None for `D ** -0.5`.
        window: how many keys a token sees, itself included, from 1 to L; the cache is then a ring, in which position p
            has slot `p % L`. None: it sees all keys.
        softcap: c makes `c * tanh(s / c)` of scaled scores s; above 0. None for no soft cap.
        q_norm: `(D,)`, weight of an RMSNorm of each head of q, before the rotation; any float dtype. None for none.
        k_norm: `(D,)`, that of k; given if q_norm is.
        norm_offset: added to q_norm and k_norm.
        eps: of these norms.
        sinks: `(H,)`, any float dtype: a further logit of each head, which has no value. None for none.
        block_table: `(rows, L / page)`, int32: the page of each `page` positions of a row. Entries behind the new token
            do not matter; no page that is written may be of two rows. None for a cache without pages.
        level: as in `norm_linear`. None is "triton" on a GPU that it runs on: level "native" copies the cache.

    Returns:
        `(rows, H D)` in the dtype of qkv.

    Raises:
        TypeError, ValueError, RuntimeError: as `norm_linear`.

    Nothing of a call depends on the values of lengths and block_table: it does not wait for the GPU, and a CUDA graph
    of it stays right while they change.
    """
    options = scale, window, softcap, q_norm, k_norm, norm_offset, eps, sinks, block_table
    return ROTARY_CACHE_ATTENTION(qkv, k_cache, v_cache, lengths, cos, sin, num_heads, *options, level)


def _norm_linear(level: str | None, *given: Any) -> Prepared:
    x, weight, norm_weight, bias, *of_norm = given
    check_product("norm_linear", x, weight, bias)
    return _of_norm("norm_linear", level, x, weight, norm_weight, bias, (), of_norm)


def _norm_gated_linear(level: str | None, *given: Any) -> Prepared:
    x, weight, norm_weight, bias, activation, *of_norm = given
    check_product("norm_gated_linear", x, weight, bias, parts=2)
    check_choice("activation", activation, ACTIVATIONS)
    return _of_norm("norm_gated_linear", level, x, weight, norm_weight, bias, (activation,), of_norm)


def _of_norm(
    function: str, level: str | None, x: Tensor, weight: Tensor, norm_weight: Tensor, bias: Tensor | None,
    options: tuple[str, ...], of_norm: list[Any],
) -> Prepared:  # fmt: skip
    norm, norm_bias, norm_offset, eps = of_norm
    check_norm(x, norm, norm_weight, norm_bias, norm_offset, eps)
    check_no_gradient(function, x=x, weight=weight, norm_weight=norm_weight, bias=bias, norm_bias=norm_bias)
    x, weight, bias = _as_autocast(x, weight, bias)
    check_dtypes(x=x, weight=weight, bias=bias)
    given = x, weight, norm_weight, bias, *options, norm, norm_bias, float(norm_offset), float(eps)
    return Prepared(level, given, _features(x, norm_weight, norm_bias), state=_autocast_dtype)


def _linear_residual(level: str | None, *given: Any) -> Prepared:
    x, weight, residual, bias = given
    if residual is None:
        raise TypeError("residual: given None; it must be a tensor of the shape of the result")
    check_product("linear_residual", x, weight, bias, residual)
    check_no_gradient("linear_residual", x=x, weight=weight, residual=residual, bias=bias)
    x, weight, residual, bias = _as_autocast(x, weight, residual, bias)
    check_dtypes(x=x, weight=weight, residual=residual, bias=bias)
    return Prepared(level, (x, weight, residual, bias), _features(x), state=_autocast_dtype)


def _rotary_cache_attention(level: str | None, *given: Any) -> Prepared:
    qkv, k_cache, v_cache, lengths, cos, sin, num_heads, *options = given
    scale, window, softcap, q_norm, k_norm, norm_offset, eps, sinks, block_table = options
    check_heads(qkv, k_cache, v_cache, num_heads, block_table)
    check_places(qkv, k_cache, lengths, cos, sin, window, block_table)
    check_options(k_cache, num_heads, scale, softcap, q_norm, k_norm, norm_offset, eps, sinks)
    wanting = {"qkv": qkv, "k_cache": k_cache, "v_cache": v_cache, "q_norm": q_norm, "k_norm": k_norm, "sinks": sinks}
    check_no_gradient("rotary_cache_attention", **wanting)
    factor = k_cache.shape[-1] ** -0.5 if scale is None else float(scale)
    cap = None if softcap is None else float(softcap)
    features = _features(qkv, q_norm, k_norm, sinks)
    features += (HEAD_SIZE,) if k_cache.shape[-1] > 256 else ()
    features += () if k_cache.is_contiguous() and v_cache.is_contiguous() else (STRIDED,)
    options = [factor, window, cap, q_norm, k_norm, float(norm_offset), float(eps), sinks, block_table]
    return Prepared(level, (qkv, k_cache, v_cache, lengths, cos, sin, num_heads, *options), features)


def _features(*tensors: Tensor | None) -> tuple[str, ...]:
    return (FLOAT64,) if any(t is not None and t.dtype == torch.float64 for t in tensors) else ()


def _autocast_dtype() -> torch.dtype:
    """What autocast casts to, which no tensor shows."""
    return torch.get_autocast_dtype("cuda")


def _as_autocast(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """What autocast makes of the operands of a product: float64 stays as it is."""
    device = x.device.type
    # What has no autocast, "meta" for example, must not be asked whether it is on.
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x, *others
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), *(None if t is None else t.to(dtype) for t in others)


NORM_LINEAR = Operation(LADDER, "norm_linear", prepare=_norm_linear)
NORM_GATED_LINEAR = Operation(LADDER, "norm_gated_linear", prepare=_norm_gated_linear)
LINEAR_RESIDUAL = Operation(LADDER, "linear_residual", prepare=_linear_residual)
ROTARY_CACHE_ATTENTION = Operation(LADDER, "rotary_cache_attention", prepare=_rotary_cache_attention)
