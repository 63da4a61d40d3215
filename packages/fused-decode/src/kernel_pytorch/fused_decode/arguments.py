"""Checks of arguments, of the public functions and of operators that are called directly."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._core.arguments import (
    check_choice,
    check_device,
    check_eps,
    check_filled,
    check_floats,
    check_integer,
    check_number,
    check_parameter,
    check_tensor,
    shape_of,
)
from ._core.call_kinds import needs_grad

MOST_ROWS = 16
NORMS = ("rms", "layer")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
LARGEST = torch.finfo(torch.float32).max

OTHERS = {
    "norm_linear": "kernel_pytorch.rmsnorm or kernel_pytorch.fused_ln_act, and torch.nn.functional.linear",
    "norm_gated_linear": "kernel_pytorch.rmsnorm, torch.nn.functional.linear and kernel_pytorch.fused_ln_act",
    "linear_residual": "torch.nn.functional.linear",
    "rotary_cache_attention": "kernel_pytorch.qkv_fusion and kernel_pytorch.flash_attn_triton",
}
"""By function, what computes the same of more rows, and has gradients."""


def always(comparison: Any) -> bool:
    """Whether a comparison of sizes is true; where torch.compile or torch.export leaves sizes open, whether of all."""
    if torch.compiler.is_compiling() or not isinstance(comparison, bool):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(comparison)
    return comparison


def check_rows(name: str, rows: int, function: str) -> None:
    """Raise ValueError if there are more rows than a step has."""
    if always(rows > MOST_ROWS):
        raise ValueError(
            f"{name}: {rows} rows; {function} takes at most {MOST_ROWS}, the new tokens of one step; for more use "
            f"{OTHERS[function]}"
        )


def check_no_gradient(function: str, **tensors: Tensor | None) -> None:
    """Raise RuntimeError, naming the first of these tensors that requires a gradient, if one does."""
    for name, tensor in tensors.items():
        if needs_grad(tensor):
            raise RuntimeError(
                f"{name}: requires a gradient, and {function} is for generation and has none; call it under "
                f"torch.no_grad() or torch.inference_mode(), or train with {OTHERS[function]}"
            )


def check_product(
    function: str, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, parts: int = 1
) -> None:
    """Raise unless these are rows, the weight of a linear layer with `parts` parts, its bias and a residual sum."""
    check_tensor("x", x)
    check_tensor("weight", weight)
    check_device("weight", weight, x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        shapes = f"shape is {shape_of(weight)}; for x of shape {shape_of(x)}"
        raise ValueError(f"weight: {shapes} it must be (outputs, {x.shape[-1]})")
    if weight.shape[0] == 0 or weight.shape[0] % parts != 0:
        what = "at least 1 row" if parts == 1 else "an even number of rows, those of the gate and then those beside it"
        raise ValueError(f"weight: shape is {shape_of(weight)}; it must have {what}")
    columns = weight.shape[0]
    if bias is not None:
        check_floats("bias", bias)
        check_device("bias", bias, x)
        if bias.shape != (columns,):
            raise ValueError(f"bias: shape is {shape_of(bias)}; it must be that of the outputs, ({columns},)")
    if residual is not None:
        check_floats("residual", residual)
        check_device("residual", residual, x)
        if residual.shape != (*x.shape[:-1], columns):
            wanted = (*shape_of(x)[:-1], columns)
            raise ValueError(f"residual: shape is {shape_of(residual)}; it must be that of the result, {wanted}")
    check_rows("x", math.prod(x.shape[:-1]), function)


def check_dtypes(**tensors: Tensor | None) -> None:
    """Raise TypeError unless all of these have the dtype of the first."""
    (first, x), *others = tensors.items()
    assert x is not None
    for name, tensor in others:
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(f"{name}: dtype is {tensor.dtype}; it must be that of {first}, {x.dtype}")


def check_norm(
    x: Tensor, norm: str, norm_weight: Tensor, norm_bias: Tensor | None, norm_offset: float, eps: float
) -> None:
    """Raise unless these make a norm of the rows of x."""
    check_choice("norm", norm, NORMS)
    if norm_weight is None:
        raise TypeError(f"norm_weight: given None; it must be a tensor of shape ({x.shape[-1]},)")
    check_parameter("norm_weight", norm_weight, x)
    check_parameter("norm_bias", norm_bias, x)
    if norm == "rms" and norm_bias is not None:
        raise ValueError("norm_bias: given a tensor; norm 'rms' has none, norm 'layer' has one")
    check_number("norm_offset", norm_offset)
    check_eps(eps)


def check_heads(qkv: Tensor, k_cache: Tensor, v_cache: Tensor, num_heads: int, block_table: Tensor | None) -> None:
    """Raise unless qkv holds the heads of new tokens that fit the caches."""
    check_tensor("qkv", qkv)
    wanted = "(rows, KV heads, slots, head size)" if block_table is None else "(pages, KV heads, page size, head size)"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_floats(name, cache)
        check_device(name, cache, qkv, "qkv")
        if cache.dim() != 4 or 0 in cache.shape[1:] or (block_table is not None and cache.shape[0] == 0):
            raise ValueError(f"{name}: shape is {shape_of(cache)}; it must be {wanted}, none of them 0")
        if any(stride == 0 and size > 1 for size, stride in zip(cache.shape, cache.stride(), strict=True)):
            raise ValueError(f"{name}: stride is {cache.stride()}; it is written into, and must not be expanded")
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"v_cache: shape is {shape_of(v_cache)}; it must be that of k_cache, {shape_of(k_cache)}")
    # A call hands a tensor that it was given twice on as two views of one memory.
    if v_cache is k_cache or (
        not torch.compiler.is_compiling()  # Dynamo knows no storages
        and v_cache.untyped_storage()._cdata == k_cache.untyped_storage()._cdata
        and v_cache.storage_offset() == k_cache.storage_offset()
    ):
        raise ValueError("v_cache: it is k_cache; it must be another tensor")
    check_dtypes(qkv=qkv, k_cache=k_cache, v_cache=v_cache)
    check_integer("num_heads", num_heads)
    kv_heads, depth = k_cache.shape[1], k_cache.shape[3]
    if num_heads < 1 or num_heads % kv_heads != 0:
        raise ValueError(f"num_heads: given {num_heads}; it must be a multiple of the {kv_heads} heads of k_cache")
    columns = (num_heads + 2 * kv_heads) * depth
    if qkv.dim() != 2 or qkv.shape[1] != columns:
        heads = f"{num_heads} heads of q and {kv_heads} each of k and v, of {depth}"
        raise ValueError(f"qkv: shape is {shape_of(qkv)}; it must be (rows, {columns}) for {heads}")
    if block_table is None and k_cache.shape[0] != qkv.shape[0]:
        raise ValueError(f"k_cache: shape is {shape_of(k_cache)}; it must have the {qkv.shape[0]} rows of qkv")
    check_rows("qkv", qkv.shape[0], "rotary_cache_attention")


def check_places(
    qkv: Tensor, k_cache: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor, window: int | None,
    block_table: Tensor | None,
) -> None:  # fmt: skip
    """Raise unless these say where new tokens are: lengths, angles, a window and pages; no value is read."""
    rows, slots = qkv.shape[0], k_cache.shape[2]
    _check_int32("lengths", lengths, qkv)
    if lengths.shape != (rows,):
        raise ValueError(f"lengths: shape is {shape_of(lengths)}; it must be (rows,), ({rows},)")
    if block_table is not None:
        _check_int32("block_table", block_table, qkv)
        if block_table.dim() != 2 or block_table.shape[0] != rows or block_table.shape[1] == 0:
            shape = shape_of(block_table)
            raise ValueError(f"block_table: shape is {shape}; it must be ({rows}, pages of a row), at least 1 page")
        slots = slots * block_table.shape[1]
    for name, angles in (("cos", cos), ("sin", sin)):
        check_tensor(name, angles)
        check_device(name, angles, qkv, "qkv")
        if angles.dtype not in (torch.float32, torch.promote_types(qkv.dtype, torch.float32)):
            raise TypeError(f"{name}: dtype is {angles.dtype}; it must be torch.float32")
        if angles.dim() != 2 or angles.shape[0] == 0 or 2 * angles.shape[1] > k_cache.shape[3]:
            most = k_cache.shape[3] // 2
            raise ValueError(f"{name}: shape is {shape_of(angles)}; it must be (positions, 1 to {most})")
    if sin.shape != cos.shape:
        raise ValueError(f"sin: shape is {shape_of(sin)}; it must be that of cos, {shape_of(cos)}")
    if window is not None:
        check_integer("window", window, "an integer or None")
        if window < 1 or always(window > slots):
            raise ValueError(f"window: given {window}; it must be 1 to {slots}, the slots of the cache of a row")


def check_options(
    k_cache: Tensor, num_heads: int, scale: float | None, softcap: float | None, q_norm: Tensor | None,
    k_norm: Tensor | None, norm_offset: float, eps: float, sinks: Tensor | None,
) -> None:  # fmt: skip
    """Raise unless these are options of attention."""
    if (q_norm is None) != (k_norm is None):
        raise ValueError(f"{'q' if q_norm is None else 'k'}_norm: given None; give both q_norm and k_norm, or neither")
    check_parameter("q_norm", q_norm, k_cache)
    check_parameter("k_norm", k_norm, k_cache)
    if scale is not None:
        check_number("scale", scale)
    if softcap is not None:
        check_number("softcap", softcap)
        if not 0.0 < softcap <= LARGEST:
            raise ValueError(f"softcap: given {softcap}; it must be above 0 and in float32, or None for no soft cap")
    check_number("norm_offset", norm_offset)
    check_eps(eps)
    if sinks is not None:
        check_floats("sinks", sinks)
        check_device("sinks", sinks, k_cache, "k_cache")
        if sinks.shape != (num_heads,):
            raise ValueError(f"sinks: shape is {shape_of(sinks)}; it must be (num_heads,), ({num_heads},)")


def _check_int32(name: str, tensor: Tensor, qkv: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int32:
        given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: given {given}; it must be a tensor of torch.int32")
    check_device(name, tensor, qkv, "qkv")
    check_filled(name, tensor)
