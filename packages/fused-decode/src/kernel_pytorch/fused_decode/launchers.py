"""What the operators launch: arguments that a kernel cannot read are refused, strided ones copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._core.arguments import check_choice
from ._core.plans import Planned
from .arguments import (
    ACTIVATIONS,
    check_dtypes,
    check_heads,
    check_norm,
    check_options,
    check_places,
    check_product,
)
from .launch import attend, project

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype is {tensor.dtype}; allowed are {', '.join(map(str, DTYPES))}")


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _project(x: Tensor, weight: Tensor, outputs: int, **options: Any) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    y = x.new_empty((*x.shape[:-1], outputs))
    if rows.shape[0] > 0:
        given: dict[str, Any] = {name: _contiguous(v) if isinstance(v, Tensor) else v for name, v in options.items()}
        project(rows.contiguous(), weight.contiguous(), y.view(-1, outputs), **given)
    return y


def _of_norm(function: str, is_gated: bool) -> Planned:
    """The launcher of an operator that normalises; the gated one has its activation ahead of the norm."""

    def split(options: tuple[Any, ...]) -> tuple[Any, ...]:
        return options if is_gated else (None, *options)

    def plan(x: Tensor, weight: Tensor, norm_weight: Tensor, bias: Tensor | None, *options: Any) -> Callable[..., Any]:
        activation, norm, *of_norm = split(options)
        _check_dtype("x", x)
        check_product(function, x, weight, bias, parts=1 + is_gated)
        check_norm(x, norm, norm_weight, *of_norm)
        check_dtypes(x=x, weight=weight, bias=bias)
        if is_gated:
            check_choice("activation", activation, ACTIVATIONS)
        return run

    def run(x: Tensor, weight: Tensor, norm_weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        activation, norm, norm_bias, norm_offset, eps = split(options)
        return _project(
            x, weight, weight.shape[0] // (1 + is_gated), norm=norm, norm_weight=norm_weight, norm_bias=norm_bias,
            norm_offset=norm_offset, eps=eps, bias=bias, gated=activation,
        )  # fmt: skip

    return Planned(plan)


norm_linear = _of_norm("norm_linear", is_gated=False)
norm_gated_linear = _of_norm("norm_gated_linear", is_gated=True)


@Planned
def linear_residual(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None) -> Callable[..., Tensor]:
    """Plan `linear_residual` of the operators."""
    _check_dtype("x", x)
    check_product("linear_residual", x, weight, bias, residual)
    check_dtypes(x=x, weight=weight, residual=residual, bias=bias)

    def run(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None) -> Tensor:
        return _project(x, weight, weight.shape[0], residual=residual, bias=bias)

    return run


@Planned
def rotary_cache_attention(*given: Any) -> Callable[..., Tensor]:
    """Plan `rotary_cache_attention` of the operators; the caches must be contiguous, because they are written into."""
    qkv, k_cache, v_cache, lengths, cos, sin, num_heads, *options = given
    scale, window, softcap, q_norm, k_norm, norm_offset, eps, sinks, block_table = options
    _check_dtype("qkv", qkv)
    check_heads(qkv, k_cache, v_cache, num_heads, block_table)
    check_places(qkv, k_cache, lengths, cos, sin, window, block_table)
    check_options(k_cache, num_heads, scale, softcap, q_norm, k_norm, norm_offset, eps, sinks)
    if k_cache.shape[3] > 256:
        raise ValueError(f"k_cache: head size is {k_cache.shape[3]}; the kernel takes up to 256")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not cache.is_contiguous():
            raise ValueError(f"{name}: stride is {cache.stride()}; it is written into, and must be contiguous")

    def run(*given: Any) -> Tensor:
        qkv, k_cache, v_cache, *others, num_heads = given[:7]
        scale, window, softcap, q_norm, k_norm, norm_offset, eps, sinks, block_table = given[7:]
        o = qkv.new_empty((qkv.shape[0], num_heads * k_cache.shape[3]))
        if o.shape[0] > 0:
            lengths, cos, sin = (t.contiguous() for t in others)
            attend(
                qkv.contiguous(), k_cache, v_cache, lengths, cos, sin, o, num_heads=num_heads,
                scale=scale, window=window, softcap=softcap, q_norm=_contiguous(q_norm), k_norm=_contiguous(k_norm),
                norm_offset=norm_offset, eps=eps, sinks=_contiguous(sinks), block_table=_contiguous(block_table),
            )  # fmt: skip
        return o

    return run
