"""One step: a token of each row in, the next token of each row out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cache import Caches
from .plan import Layer, Norm, Plan
from .sampling import Sampling

ENDS = 64
"""How many end tokens a step compares with."""


class Step:
    """The buffers of a step, and what it computes.

    Attributes:
        tokens: int64 `(rows,)`, what a step begins with; the next tokens afterwards.
        ends: int64 `(ENDS,)`, tokens that end a row; -2 where there are fewer.
        caches: keys, values, lengths and chosen tokens; a row that has ended has a length of -1.
        last_logits: of the last step, `(rows, vocabulary)`.
    """

    def __init__(self, plan: Plan, caches: Caches, ops: Any, extra: dict[str, Any] | None = None) -> None:
        self.plan, self.caches, self.ops, self.extra = plan, caches, ops, extra or {}
        device, rows = plan.table.device, caches.lengths.shape[0]
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.ends = torch.full((ENDS,), -2, dtype=torch.int64, device=device)
        self.sampling = Sampling(rows, device)
        self.last_logits = torch.empty(0, device=device)

    def __call__(self, how: str) -> Tensor:
        """Compute the next tokens, and return their logits; nothing waits for the host."""
        self.last_logits = self.logits()
        self.choose(self.last_logits, how)
        return self.last_logits

    def choose(self, logits: Tensor, how: str) -> None:
        """Take the next token of each row from its logits `(rows, vocabulary)`, and end rows that are complete.

        Args:
            logits: of the rows.
            how: "greedy"; "draw", among the `CANDIDATES` largest where there is a kernel; or "draw from all".
        """
        lengths, written = self.caches.lengths, self.caches.written
        if self.has_kernel(how):
            state = self.tokens, self.caches.history, lengths, self.ends
            if how == "greedy":
                self.ops.greedy(logits, *state, **self.extra)
            else:
                self.ops.draw(logits, self.sampling, *state)
            return
        active = lengths >= 0
        next_token = self.sampling.greedy(logits) if how == "greedy" else self.sampling.draw(logits)
        ended = (next_token[:, None] == self.ends).any(1) | (next_token < 0)
        row, at = torch.arange(len(lengths), device=lengths.device), lengths.clamp_min(0).long()
        written[row, at] = torch.where(active, next_token, written[row, at])
        lengths.copy_(torch.where(active & ~ended, lengths + 1, -1))
        self.tokens.copy_(next_token.clamp_min(0))

    def has_kernel(self, how: str) -> bool:
        """Whether one kernel chooses, and writes to `caches.history`; if not, `caches.written` gets the tokens."""
        return hasattr(self.ops, how)

    def logits(self) -> Tensor:
        """Run all layers on `tokens`, which are stored at `lengths`; `(rows, vocabulary)`."""
        return self.head(self.hidden(self.tokens))

    def hidden(self, tokens: Tensor) -> Tensor:
        """Run all layers on tokens `(rows,)`; `(rows, width)`."""
        x = self.ops.embed(tokens, self.plan.table, scale=self.plan.scale, **self._pdl)
        for layer, caches in zip(self.plan.layers, self.caches.layers, strict=True):
            x = self._layer(layer, caches, x)
        return x

    def head(self, x: Tensor) -> Tensor:
        """Logits `(rows, vocabulary)` of what the layers made of tokens, `(rows, width)`."""
        head, norm = self.plan.head, _norm(self.plan.norm)
        return self.ops.project(x, head.weight, bias=head.bias, softcap=self.plan.softcap, **norm, **self.extra)

    def _layer(self, layer: Layer, caches: tuple[Tensor, ...], x: Tensor) -> Tensor:
        attention, project = layer.attention, self.ops.project
        qkv, gate_up = attention.qkv, layer.gate_up
        y = project(x, qkv.weight, bias=qkv.bias, **_norm(layer.attention_norm), **self.extra)
        x = self._add(self._attend(layer, caches, y), attention.output, layer.attention_post, x)
        y = project(
            x, gate_up.weight, bias=gate_up.bias, gated=layer.activation, **_norm(layer.unit_norm), **self.extra
        )
        return self._add(y, layer.down, layer.unit_post, x)

    def _attend(self, layer: Layer, caches: tuple[Tensor, ...], qkv: Tensor) -> Tensor:
        attention, norms = layer.attention, {}
        q_norm, k_norm, first = attention.q_norm, attention.k_norm, attention.heads * attention.head_dim
        if q_norm is not None and k_norm is not None:
            if attention.per_head:
                norms = {"q_norm": q_norm.weight, "k_norm": k_norm.weight}
                norms.update(norm_offset=q_norm.offset, eps=q_norm.eps)
            else:
                for part, norm in ((qkv[:, :first], q_norm), (qkv[:, first:][:, : k_norm.weight.numel()], k_norm)):
                    self.ops.add_norm(part, norm.weight, out=part, norm_offset=norm.offset, eps=norm.eps, **self._pdl)
        k, v, cos, sin = caches
        return self.ops.attend(
            qkv, k, v, self.caches.lengths, cos, sin, num_heads=attention.heads, scale=attention.scale,
            window=attention.window, softcap=attention.softcap, **norms, **self.extra,
        )  # fmt: skip

    def _add(self, y: Tensor, linear: Any, post: Norm | None, residual: Tensor) -> Tensor:
        """`residual + post(linear(y))`."""
        if post is None:
            return self.ops.project(y, linear.weight, bias=linear.bias, residual=residual, **self.extra)
        y = self.ops.project(y, linear.weight, bias=linear.bias, **self.extra)
        return self.ops.add_norm(y, post.weight, residual=residual, norm_offset=post.offset, eps=post.eps, **self._pdl)

    @property
    def _pdl(self) -> dict[str, Any]:
        return {name: value for name, value in self.extra.items() if name == "pdl"}


def _norm(norm: Norm | None) -> dict[str, Any]:
    if norm is None:
        return {}
    return {"norm": "rms", "norm_weight": norm.weight, "norm_offset": norm.offset, "eps": norm.eps}
