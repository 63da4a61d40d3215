"""The next token of each row: the largest logit, or a draw.

A draw is transformers': temperature, then top-k, which keeps ties with the k-th, then top-p. It takes the kept token
with the largest `log p - log e`, where e is exponential noise, which is a draw from p. Noise is a function of seed,
row, step and token alone: the same on every device, and in a captured graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.fused_decode._core.philox import philox

STEPS = 1 << 20
"""Draws of a row before its noise comes again."""
CANDIDATES = 1024
"""How many of the largest logits the kernel of a draw chooses among."""


class Sampling:
    """What a draw depends on, as tensors, so that a captured step serves all values.

    Attributes:
        seed: int64 `()`.
        step: int64 `()`, counts draws.
        temperature, top_p: float32 `()`.
        top_k: int64 `()`; at least 1, the size of the vocabulary for all.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.seed, self.step, self.top_k = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(3))
        self.temperature, self.top_p = (torch.ones((), dtype=torch.float32, device=device) for _ in range(2))
        self.rows = torch.arange(rows, dtype=torch.int64, device=device)[:, None]

    def set(self, seed: int, temperature: float, top_k: int, top_p: float) -> None:
        """Set all of them, and begin with the first step."""
        self.seed.fill_(seed)
        self.step.zero_()
        self.temperature.fill_(temperature)
        self.top_k.fill_(top_k)
        self.top_p.fill_(top_p)

    def greedy(self, logits: Tensor) -> Tensor:
        """The largest logit in float32, the first of several; -1 where a row has none, or NaN or infinity."""
        logits = logits.float()
        return logits.argmax(-1).masked_fill(~logits.amax(-1).isfinite(), -1)

    def draw(self, logits: Tensor) -> Tensor:
        """A token drawn from what temperature, top-k and top-p leave; -1 as in `greedy`."""
        kept = self.kept(logits)
        token = (kept - self._noise(*kept.shape).log()).argmax(-1)
        self.step.add_(1)
        return token.masked_fill(~logits.amax(-1).isfinite(), -1)

    def kept(self, logits: Tensor) -> Tensor:
        """Logits over the temperature, float32, minus infinity where top-k or top-p removes them."""
        scores = logits.float() / self.temperature
        in_order, order = scores.sort(-1)
        size = scores.shape[-1]
        lowest = in_order.gather(-1, (size - self.top_k.clamp(1, size)).expand(scores.shape[0], 1))
        in_order = in_order.masked_fill(in_order < lowest, float("-inf"))
        remove = in_order.softmax(-1).cumsum(-1) <= 1 - self.top_p
        remove = (remove & (self.top_p < 1)) | in_order.isneginf()
        remove[:, -1] = False
        return scores.masked_fill(torch.zeros_like(remove).scatter(-1, order, remove), float("-inf"))

    def _noise(self, rows: int, size: int) -> Tensor:
        """Exponential noise above 0, float32 `(rows, size)`."""
        quads = torch.arange((size + 3) // 4, dtype=torch.int64, device=self.rows.device)
        counter = ((self.rows * STEPS + self.step % STEPS) << 32) + quads
        words = torch.stack(philox(self.seed, counter), -1).reshape(rows, -1)[:, :size]
        return -torch.log1p(-((words.float() + 0.5) * 2.0**-32).clamp_max(1 - 2.0**-24))
