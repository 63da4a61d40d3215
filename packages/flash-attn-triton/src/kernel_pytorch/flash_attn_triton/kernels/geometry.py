"""What the launchers of forward and backward have in common: checks, strides, constants, allocation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from kernel_pytorch.flash_attn_triton._core.direct_calls import check_memory
from kernel_pytorch.flash_attn_triton._core.sizes import allocator, exceeds_int32, next_power_of_2
from kernel_pytorch.flash_attn_triton.arguments import (
    check_bias,
    check_qkv,
    check_sinks,
    check_starts,
    seed_of,
    slopes_of,
)
from kernel_pytorch.flash_attn_triton.rules.triton import empty_like

from .configurations import Table, configuration

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Geometry:
    """Shapes and strides of a call, checked; it keeps no tensor.

    A direct call of the operator passes no other check, and a wrong shape would read out of bounds.

    Attributes:
        rows: queries of a sequence, of the longest one with packed sequences.
        columns: keys of a sequence, of the longest one with packed sequences.
        group: query heads that read one head of keys.
        left, right: how far a query sees, -1 for no limit.
        sizes: the first scalars of all kernels; their last two are queries and keys of all packed sequences.
        is_busy: whether something takes registers beside the tiles: a bias or dropout.
        has_features: whether scores are more than scaled products, or weights dropped.
        constants: of all kernels.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
        seed: Tensor | None, scale: float, left: int, right: int, softcap: float, dropout_p: float,
        cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    ) -> None:  # fmt: skip
        _check(q, k, v, bias, alibi_slopes, sinks, seed, dropout_p, cu_seqlens_q, cu_seqlens_k)
        self.varlen = cu_seqlens_q is not None
        self.batch, self.heads, self.rows, self.depth = q.shape
        self.columns, self.kv_heads = k.shape[2], k.shape[1]
        self.group = self.heads // self.kv_heads
        # No key is farther from a query than this, and sums of larger numbers overflow 32 bits.
        self.left, self.right = (min(side, q.shape[2] + k.shape[2]) for side in (left, right))
        if cu_seqlens_q is not None:
            self.batch = cu_seqlens_q.shape[0] - 1
            self.rows, self.columns = max_seqlen_q, max_seqlen_k
        self.sizes = (self.heads, self.group, self.rows, self.columns, self.depth, self.left, self.right,
                      q.shape[2], k.shape[2])  # fmt: skip
        self.padded_depth = max(16, next_power_of_2(self.depth))
        self.whole_head = self.depth == self.padded_depth
        self.itemsize, self.device = q.element_size(), q.device
        self.scores_shape = (q.shape[0], self.heads, q.shape[2], k.shape[2])
        self.q_like, self.k_like = _Allocation(q, self.varlen), _Allocation(k, self.varlen)
        self.is_empty = q.numel() == 0 or self.rows == 0 or self.batch == 0
        self.q_strides, self.k_strides, self.v_strides = (self.strides_of(t) for t in (q, k, v))
        self.o_strides = self.strides_of(self.q_like.meta)
        self.dk_strides = self.strides_of(self.k_like.meta)
        self.bias_strides = (0, 0, 0, 0) if bias is None else bias.expand(self.scores_shape).stride()
        self.slopes_strides = (0, 0)
        if alibi_slopes is not None:
            self.slopes_strides = alibi_slopes.expand(self.batch, self.heads).stride()
        tensors = [q, k, v, self.q_like.meta, self.k_like.meta, *([] if bias is None else [bias])]
        self.long_offsets = exceeds_int32(*tensors)
        self.constants: dict[str, Any] = {
            "SCALE": scale, "SOFTCAP": softcap, "DROPOUT_P": dropout_p,
            "ALIBI": "none" if alibi_slopes is None else "past" if right == 0 else "both",
            "BIAS": "none" if bias is None else "bool" if bias.dtype == torch.bool else "float",
            "HAS_LEFT": left >= 0, "HAS_RIGHT": right >= 0,
        }  # fmt: skip
        self.is_busy = bias is not None or dropout_p > 0.0
        self.has_features = self.is_busy or alibi_slopes is not None or softcap > 0.0

    def strides_of(self, x: Tensor) -> tuple[int, ...]:
        """Strides of batch, heads and tokens, of a copy where the head itself has gaps."""
        x = self.unit_depth(x)
        return (0, *x.stride()[1:3]) if self.varlen else x.stride()[:3]

    @staticmethod
    def unit_depth(x: Tensor) -> Tensor:
        """x, or a copy where neighbours in a head are not neighbours in memory."""
        return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()

    @staticmethod
    def dense(x: Tensor | None) -> Tensor | None:
        """A vector without gaps."""
        return None if x is None else x.contiguous()

    @staticmethod
    def bias_data(bias: Tensor | None) -> Tensor | None:
        """The bias as a kernel reads it: Triton calls a bool uint8."""
        return bias if bias is None or bias.dtype != torch.bool else bias.view(torch.uint8)

    def options(self, table: Table) -> dict[str, Any]:
        """Constants and options of a kernel, with its tiles for this head size on the current device.

        NARROW: whether one tile may reach beyond both edges of the window, or beyond its left edge and the last key.
        """
        interpreted = triton.knobs.runtime.interpret
        architecture = None if interpreted else triton.runtime.driver.active.get_current_target().arch
        tile = configuration(table, architecture, self.depth, self.itemsize, self.is_busy)
        both = self.right >= 0 and self.left + self.right < tile.rows + tile.columns - 3
        return {
            **self.constants, "NARROW": self.left >= 0 and (both or self.left < tile.columns),
            "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": self.padded_depth, "WHOLE_HEAD": self.whole_head,
            "LONG_OFFSETS": self.long_offsets, "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip

    def new_o(self) -> Tensor:
        """Memory for the output, or the gradient of q."""
        return self.q_like.new()

    def new_saved(self, keep: bool) -> tuple[Tensor, Tensor]:
        """Memory for maxima and sums, and for what rounding takes off the output of 16 bits; empty if not kept.

        Tokens in no packed sequence have a sum of zero.
        """
        nothing = self.q_like.meta.new_empty((0,), device=self.device)
        if not keep:
            return torch.empty((0,), dtype=torch.float32, device=self.device), nothing
        make = torch.zeros if self.varlen else torch.empty
        normalizer = make((*self.q_like.meta.shape[:-1], 2), dtype=torch.float32, device=self.device)
        return normalizer, nothing if self.itemsize == 4 else self.q_like.new(zeros=False)

    def results(self, keep: bool, fill: float = 0.0) -> Callable[[], tuple[Tensor, ...]]:
        """What makes memory for the output, lse and what is saved: the same as `new_o`, `new_lse` and `new_saved`."""
        if self.varlen:
            return lambda: (self.new_o(), self.new_lse(fill), *self.new_saved(keep))
        shape, wide, like = self.q_like.meta.shape, torch.float32, self.q_like.meta.new_empty((0,), device=self.device)
        new_o, new_lse = allocator(like, shape), allocator(like, shape[:-1], wide)
        new_normalizer = allocator(like, (*shape[:-1], 2), wide, needed=keep)
        new_rest = allocator(like, shape, needed=keep and self.itemsize != 4)
        return lambda: (new_o(), new_lse(), new_normalizer(), new_rest())

    def new_kv(self) -> Tensor:
        """Memory for the gradient of k or v."""
        return self.k_like.new()

    def new_lse(self, fill: float = 0.0) -> Tensor:
        """Memory for one float32 a query and head; of packed sequences `fill`, for tokens that are in none of them."""
        shape = self.q_like.meta.shape[:-1]
        if self.varlen:
            return torch.full(shape, fill, dtype=torch.float32, device=self.device)
        return torch.empty(shape, dtype=torch.float32, device=self.device)


class _Allocation:
    """Makes tensors of one shape; `meta` is one without memory."""

    def __init__(self, like: Tensor, packed: bool) -> None:
        self.meta = empty_like(torch.empty_like(like, device="meta"), packed)
        self.packed, self.device = packed, like.device

    def new(self, zeros: bool = True) -> Tensor:
        """Memory; with packed sequences zeros, if they are wanted, for tokens behind the last one."""
        made = empty_like(self.meta, self.packed, self.device)
        return made.zero_() if self.packed and zeros else made


def check_all_memory(**tensors: Tensor | None) -> None:
    """Raise ValueError, naming the argument, if the memory of a tensor was freed."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_memory(name, tensor)


def check_supported(q: Tensor) -> None:
    """Raise TypeError unless kernels know heads like these."""
    if q.dtype not in DTYPES or q.shape[-1] > 256:
        given = f"{q.dtype} of shape {tuple(q.shape)}"
        raise TypeError(f"q: given {given}; allowed are float16, bfloat16 and float32 with heads of up to 256")


def _check(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, dropout_p: float, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
) -> None:  # fmt: skip
    check_qkv(q, k, v)
    check_supported(q)
    check_all_memory(seed=seed, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    batch, heads = q.shape[:2]
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("cu_seqlens_k: it must be given exactly where cu_seqlens_q is")
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        check_starts("cu_seqlens_q", cu_seqlens_q, q, "q")
        check_starts("cu_seqlens_k", cu_seqlens_k, q, "q")
        if cu_seqlens_q.shape != cu_seqlens_k.shape or batch != 1 or bias is not None:
            raise ValueError("cu_seqlens_q: its shape must be that of cu_seqlens_k, q be (1, H, S, D), bias None")
        batch = cu_seqlens_q.shape[0] - 1
    if bias is not None:
        check_bias("bias", bias, q, k)
    slopes_of(alibi_slopes, q, batch, heads)
    check_sinks(sinks, q, heads)
    if dropout_p > 0.0 and seed is None:
        raise ValueError(f"seed: given None; with dropout_p {dropout_p} it must be an int64 tensor of shape ()")
    seed_of(seed, dropout_p, q)
