"""Checks of the arguments of the public functions. Each error says what was given and what is allowed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._core.arguments import check_device, check_filled, check_floats, check_integer, check_number, shape_of
from ._core.call_kinds import needs_grad

NO_LIMIT = 2**31 - 1
"""Largest window side: no sequence is longer, and operators take 64-bit integers."""


def check_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: str = "(batch, heads, tokens, head size)",
    names: tuple[str, str, str] = ("q", "k", "v"),
    layout_of_keys: str | None = None,
) -> None:
    """Raise unless these are queries, keys and values of one head size, dtype and device in this layout.

    With layout_of_keys, keys and values have that layout of the same rank, and their first dimension is no batch.
    """
    dimensions, of_keys = layout.count(",") + 1, layout_of_keys or layout
    for name, x, wanted in zip(names, (q, k, v), (layout, of_keys, of_keys), strict=True):
        check_floats(name, x)
        if x.dim() != dimensions:
            raise ValueError(f"{name}: shape is {shape_of(x)}; it must be {wanted}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: dtype is {x.dtype}; it must be that of q, {q.dtype}")
        check_device(name, x, q, "q")
    _, of_k, of_v = names
    if q.shape[-1] == 0 or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{of_k}: head size is {k.shape[-1]}; it must be that of q, {q.shape[-1]}, and at least 1")
    if v.shape != k.shape:
        raise ValueError(f"{of_v}: shape is {shape_of(v)}; it must be that of {of_k}, {shape_of(k)}")
    if dimensions == 4 and layout_of_keys is None and k.shape[0] != q.shape[0]:
        raise ValueError(f"{of_k}: batch size is {k.shape[0]}; it must be that of q, {q.shape[0]}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(f"{of_k}: {kv_heads} heads; their number must divide that of q, {heads}")


def check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None) -> None:
    """Raise unless these are queries and a cache; values of cache_seqlens and block_table are not read."""
    pages = None if block_table is None else "(pages, heads, page size, head size)"
    check_qkv(q, k_cache, v_cache, names=("q", "k_cache", "v_cache"), layout_of_keys=pages)
    batch = q.shape[0]
    _check_int32("cache_seqlens", cache_seqlens, q)
    if cache_seqlens.shape != (batch,):
        raise ValueError(f"cache_seqlens: shape is {shape_of(cache_seqlens)}; it must be (batch,), {(batch,)}")
    if block_table is None:
        return
    _check_int32("block_table", block_table, q)
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        shape = shape_of(block_table)
        raise ValueError(f"block_table: shape is {shape}; it must be (batch, most pages of a sequence), batch {batch}")
    if k_cache.shape[0] == 0 and block_table.numel() > 0:
        raise ValueError("k_cache: given 0 pages; there must be at least 1 for block_table to name")


def _check_int32(name: str, tensor: Tensor, q: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int32:
        given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: given {given}; it must be a tensor of torch.int32")
    check_device(name, tensor, q, "q")
    check_filled(name, tensor)


def check_no_gradient(**tensors: Tensor | None) -> None:
    """Raise RuntimeError, naming the first of these tensors that requires a gradient, if one does."""
    for name, tensor in tensors.items():
        if needs_grad(tensor):
            raise RuntimeError(
                f"{name}: requires a gradient, and flash_decode has none; call it under torch.no_grad() or"
                " torch.inference_mode(), give it detached tensors, or use flash_attention"
            )


def scale_or_default(scale: float | None, q: Tensor) -> float:
    """The scale of the scores: `D ** -0.5` where none was given."""
    if scale is None:
        return float(q.shape[-1] ** -0.5)
    check_number("scale", scale)
    return float(scale)


def window_of(window: Sequence[int | None] | None) -> tuple[int, int] | None:
    """How many keys before and behind its position a query sees, -1 for all; None where there is no window."""
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window: given {window!r}; it must be None or a pair (left, right)")
    for side in window:
        if side is None:
            continue
        check_integer("window", side, "a pair of integers or None")
        if side < -1:
            raise ValueError(f"window: given {tuple(window)}; each side must be at least 0, or -1 or None for all")
    left, right = (-1 if side is None else min(side, NO_LIMIT) for side in window)
    return left, right


def check_softcap(softcap: float | None) -> None:
    """Raise unless this is None or a finite number above 0."""
    if softcap is None:
        return
    check_number("softcap", softcap)
    if softcap <= 0.0:
        raise ValueError(f"softcap: given {softcap}; it must be above 0, or None for no soft cap")


def slopes_of(alibi_slopes: Tensor | None, q: Tensor, batch: int, heads: int) -> Tensor | None:
    """The slopes without a gradient; raise unless they are None or of shape `(H,)` or `(B, H)`."""
    if alibi_slopes is None:
        return None
    check_floats("alibi_slopes", alibi_slopes)
    if alibi_slopes.shape != (heads,) and alibi_slopes.shape != (batch, heads):
        raise ValueError(
            f"alibi_slopes: shape is {shape_of(alibi_slopes)}; it must be (heads,) or (batch, heads), "
            f"{(heads,)} or {(batch, heads)}"
        )
    check_device("alibi_slopes", alibi_slopes, q, "q")
    return alibi_slopes.detach() if alibi_slopes.requires_grad else alibi_slopes


def check_sinks(sinks: Tensor | None, q: Tensor, heads: int) -> None:
    """Raise unless these are None or one logit for each head of q."""
    if sinks is None:
        return
    check_floats("sinks", sinks)
    if sinks.shape != (heads,):
        raise ValueError(f"sinks: shape is {shape_of(sinks)}; it must be (heads,), {(heads,)}")
    check_device("sinks", sinks, q, "q")


def check_bias(name: str, bias: Any, q: Tensor, k: Tensor) -> None:
    """Raise unless this is a bool or float tensor of four dimensions that broadcasts to the scores."""
    if isinstance(bias, Tensor) and bias.dtype == torch.bool:
        check_filled(name, bias)
    else:
        check_floats(name, bias)
    wanted = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if bias.dim() != 4 or any(size != 1 and size != of for size, of in zip(bias.shape, wanted, strict=True)):
        raise ValueError(f"{name}: shape is {shape_of(bias)}; it must be {wanted}, or 1 in some of these dimensions")
    check_device(name, bias, q, "q")


def seed_of(seed: Tensor | int | None, dropout_p: float, q: Tensor) -> Tensor | None:
    """The seed as a tensor, drawn by PyTorch's generator where none was given; None without dropout."""
    check_number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: given {dropout_p}; it must be at least 0 and below 1")
    if seed is not None and not isinstance(seed, Tensor):
        check_integer("seed", seed, "an int64 tensor of shape (), an integer or None")
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed: given {seed}; it must have 64 bits, from -2**63 to 2**63 - 1")
    if dropout_p == 0.0:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device=q.device)
    if not isinstance(seed, Tensor):
        return torch.full((), seed, dtype=torch.int64, device=q.device)
    if seed.dtype != torch.int64 or seed.dim() != 0:
        raise TypeError(f"seed: given {seed.dtype} of shape {shape_of(seed)}; it must be torch.int64 of shape ()")
    check_device("seed", seed, q, "q")
    check_filled("seed", seed)
    return seed


def check_starts(name: str, cu_seqlens: Tensor, x: Tensor, of: str) -> None:
    """Raise unless this is a vector of integers for at least one sequence, on the device of x, called `of`."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        given = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{name}: given {given}; it must be a tensor of torch.int32 or torch.int64")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"{name}: shape is {shape_of(cu_seqlens)}; it must be (sequences + 1,), at least (2,)")
    check_device(name, cu_seqlens, x, of)
    check_filled(name, cu_seqlens)


def check_lengths(name: str, cu_seqlens: Tensor, max_seqlen: int, x: Tensor, of: str) -> None:
    """Raise unless these are the starts of packed sequences in x, called `of`, and their end.

    Their values are read on a CPU alone: on a GPU that would wait for it. They are read after all other arguments were
    checked.
    """
    longest = name.replace("cu_", "max_").replace("seqlens", "seqlen")
    check_integer(longest, max_seqlen)
    if cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling() or type(cu_seqlens) is not Tensor:
        return
    values = cu_seqlens.tolist()
    lengths = [after - before for before, after in itertools.pairwise(values)]
    if values[0] != 0 or values[-1] != x.shape[0] or min(lengths) < 0:
        raise ValueError(f"{name}: given {values}; it must begin with 0, not fall, and end with {x.shape[0]}, as {of}")
    if max(lengths) > max_seqlen:
        raise ValueError(f"{longest}: given {max_seqlen}; the longest sequence has {max(lengths)} tokens")
