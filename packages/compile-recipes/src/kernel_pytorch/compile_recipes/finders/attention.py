"""Attention by hand: two products with a softmax between them, and the one call that it is proven equal to."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_pytorch.compile_recipes.recorder import Graph, Node, down, up

from .numbers import PRODUCTS, fresh, is_float, near, rows, tight
from .products import Linears

SOFTMAX = re.compile(r"softmax|^exp$")
LARGEST_SCORES = (2.0, 120.0)
"""Largest scores of the two proving runs: ordinary ones, and scores so large that a cap of the scores changes them."""
FAR = 16
"""Operators between the two products, at most."""


@dataclass(frozen=True)
class Attention:
    """Attention by hand: the product of queries and keys, and that of weights and values.

    Attributes:
        scale: of the scores; None if no call of `scaled_dot_product_attention` was proven equal.
        mask: the additive mask that it uses, if it uses one that the flag does not stand for.
        keys_turned: whether the second operand of `first` is keys transposed, as usual, or queries transposed.
    """

    first: Node
    second: Node
    scale: float | None = None
    is_causal: bool = False
    mask: Tensor | None = None
    keys_turned: bool = True

    @property
    def call(self) -> str:
        """The call that it is equal to; "" if none was proven."""
        if self.scale is None:
            return ""
        mask = "" if self.mask is None else "attn_mask=mask, "
        return f"scaled_dot_product_attention(q, k, v, {mask}is_causal={self.is_causal}, scale={self.scale:.6g})"


def find_attention(g: Graph, lin: Linears) -> list[Attention]:
    """Every pair of products of data with a softmax between them."""
    products = [n for n in g.nodes if n.name in PRODUCTS and n not in lin and is_float(n)]
    found = []
    for second in products:
        above = up(second, FAR)
        for first in (p for p in above if p in products):
            inside = set(above) & set(down(first, FAR))
            if not inside & set(products) and any(SOFTMAX.search(n.name) for n in inside):
                found.append(_proven(g, first, second))
                break
    return found


def _proven(g: Graph, first: Node, second: Node) -> Attention:
    """With the call of `scaled_dot_product_attention` that gives the same on fresh queries, if one does."""
    wide = [n for n in first.inputs if is_float(n, 3)]
    value = [n for n in second.inputs if is_float(n, 3) and first not in up(n, FAR + 4)]
    plain = Attention(first, second)
    if len(wide) != 2 or len(value) != 1:
        return plain
    v = value[0].value
    for q, k, turned in ((wide[0], wide[1], True), (wide[1], wide[0], False)):
        keys = k.value.mT if turned else k.value
        size = q.value.shape[-1 if turned else -2]
        own = _scale(g, first)
        scores = own * (fresh(q.value) @ k.value if turned else k.value @ fresh(q.value))
        largest = float(scores.abs().amax())
        if not 0 < largest < float("inf") or v.shape[:-1] != keys.shape[:-1]:
            continue
        news = [fresh(q.value) * (s / largest) for s in LARGEST_SCORES]
        results = [g.again(second, q, new) for new in news]
        queries = news if turned else [new.mT for new in news]
        scales = dict.fromkeys((1.0, size**-0.5, own))
        flags = (False, True)[: 1 + (queries[0].shape[-2] == keys.shape[-2])]
        calls: list[tuple[float, bool, Tensor | None]] = [(s, flag, None) for s in scales for flag in flags]
        calls += [(s, False, mask) for s in scales if (mask := _mask(g, first, s, turned)) is not None]
        for scale, causal, mask in calls:
            if all(_same(new, keys, v, mask, causal, scale, r) for new, r in zip(queries, results, strict=True)):
                return Attention(first, second, scale, causal, mask, turned)
    return plain


def _same(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, expected: Tensor) -> bool:
    ours = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return ours.shape == expected.shape and near(rows(ours), rows(expected), tight(ours) * 10)


def _softmax_input(first: Node) -> Node | None:
    soft = next((n for n in down(first, FAR) if re.search(r"softmax|^exp$|amax|logsumexp", n.name)), None)
    return soft.inputs[0] if soft is not None and is_float(soft.inputs[0]) else None


def _scale(g: Graph, first: Node) -> float:
    """By how much scores are multiplied between the product and the softmax."""
    scores = _softmax_input(first)
    if scores is None:
        return 1.0
    step = torch.zeros_like(first.value)
    step[..., 0, 0] = 1.0
    moved = (g.again(scores, first, first.value + step) - g.again(scores, first, first.value)).flatten()
    moved = moved[moved.isfinite()]
    return float(moved.abs().amax()) if moved.numel() else 1.0


def _mask(g: Graph, first: Node, scale: float, turned: bool) -> Tensor | None:
    """What is added to the scores before the softmax, if that is something; proven later, on fresh queries."""
    scores = _softmax_input(first)
    if scores is None or scores.value.numel() != first.value.numel() or not turned:
        return None
    added = scores.value.reshape(first.value.shape).float() - scale * first.value.float()
    if near(added, torch.zeros_like(added), 1e-5):
        return None
    return added.to(first.value.dtype)
