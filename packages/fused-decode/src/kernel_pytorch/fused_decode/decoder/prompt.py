"""A prompt by the layers of a step, all its tokens at once: fewer operators than in the model's own forward.

A short prompt takes as long as the host needs to launch operators, which is several steps long. So from the second
prompt of a size on it is a CUDA graph, whose columns are rounded up: causal attention does not see what is behind a
row's last token, and steps write over its slots before they read them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.fused_decode.levels import reference

from . import plain
from .cache import Caches
from .plan import Plan
from .step import Step

ROUND = 64
"""Columns of a captured prompt are a multiple of this."""
SHORT = 1024
"""Tokens, of all rows, of a prompt that is captured at most: a GPU needs longer for more than the host for a launch."""

Capture = Callable[[Callable[[], Tensor]], tuple[torch.cuda.CUDAGraph, Tensor]]


class Prompts:
    """Runs prompts whose attention needs a causal flag alone: no soft cap, no window that ends within them.

    Args:
        plan: what the model computes.
        caches: where keys and values go.
        capture: makes a CUDA graph of a function; None on a CPU.
    """

    def __init__(self, plan: Plan, caches: Caches, capture: Capture | None) -> None:
        self.plan, self.caches, self.capture = plan, caches, capture
        self._graphs: dict[tuple[int, int], Any] = {}
        self._step = Step(plan, caches, _Operators())

    def run(self, tokens: Tensor, last: Tensor) -> Tensor | None:
        """Write the keys and values of rows that begin in the first column; the logits after each.

        Args:
            tokens: int64 `(rows, columns)`, with any tokens behind the last of a row.
            last: int64 `(rows,)`, the column of the last token.

        Returns:
            `(rows, vocabulary)`, or None if attention needs more than a causal flag: nothing was done.
        """
        rows, columns = tokens.shape
        rounded = -(-columns // ROUND) * ROUND
        if self.capture is None or rows * rounded > SHORT or not self._fits(rounded):
            return self._compute(tokens, last) if self._fits(columns) else None
        size = rows, rounded
        if size not in self._graphs:
            self._graphs[size] = None  # a capture takes longer than one prompt
            return self._compute(tokens, last)
        if self._graphs[size] is None:
            given = tokens.new_zeros(size), torch.zeros_like(last)
            self._graphs[size] = (*self.capture(lambda: self._compute(*given)), *given)
        graph, logits, its_tokens, its_last = self._graphs[size]
        its_tokens[:, :columns] = tokens
        its_last.copy_(last)
        graph.replay()
        found: Tensor = logits
        return found

    def close(self) -> None:
        """Give the graphs' memory back."""
        for found in self._graphs.values():
            if found is not None:
                found[0].reset()
        self._graphs.clear()

    def _fits(self, columns: int) -> bool:
        for layer, (k, *_) in zip(self.plan.layers, self.caches.layers, strict=True):
            attention = layer.attention
            if attention.softcap is not None or columns > min(k.shape[2], attention.window or columns):
                return False
        return True

    def _compute(self, tokens: Tensor, last: Tensor) -> Tensor:
        self._step.ops.rows = len(tokens)
        x = self._step.hidden(tokens.flatten()).view(*tokens.shape, -1)
        return self._step.head(x[torch.arange(len(tokens), device=x.device), last])


class _Operators:
    """The functions of `plain.py`, with attention of whole rows."""

    embed = staticmethod(plain.embed)
    project = staticmethod(plain.project)
    add_norm = staticmethod(plain.add_norm)

    rows = 1

    def attend(
        self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor, *,
        num_heads: int, scale: float, window: int | None = None, softcap: float | None = None,
        q_norm: Tensor | None = None, k_norm: Tensor | None = None, norm_offset: float = 0.0, eps: float = 1e-6,
    ) -> Tensor:  # fmt: skip
        """Causal attention of all tokens of each row, whose keys and values go into the first slots."""
        kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
        heads = qkv.view(self.rows, -1, num_heads + 2 * kv_heads, head_dim)
        width, qk, v = heads.shape[1], heads[:, :, : num_heads + kv_heads], heads[:, :, num_heads + kv_heads :]
        if q_norm is not None and k_norm is not None:
            q, k = qk.split([num_heads, kv_heads], 2)
            qk = torch.cat([plain.rms(q, q_norm, norm_offset, eps), plain.rms(k, k_norm, norm_offset, eps)], 2)
        qk = reference.rotated(qk.float(), cos[:width], sin[:width]).to(qkv.dtype)
        q, k = qk.transpose(1, 2).split([num_heads, kv_heads], 1)
        v = v.transpose(1, 2)
        k_cache[: self.rows, :, :width], v_cache[: self.rows, :, :width] = k, v
        grouped = num_heads != kv_heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return y.transpose(1, 2).reshape(len(qkv), -1)
