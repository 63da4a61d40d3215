"""`sample` draws tokens from logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_sampling(
    temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, generator: Any = None
) -> None:
    """Raise ValueError unless these are valid arguments of `sample`."""
    if not temperature >= 0.0:
        raise ValueError(f"temperature: given {temperature}; it must not be negative")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: given {top_k}; it must be at least 1, or None")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p: given {top_p}; it must be above 0 and at most 1, or None")


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token, `(B,)` int64, for each row of logits.

    Args:
        logits: `(B, V)`, any float dtype.
        temperature: divides the logits; 0 takes the most likely token and draws nothing.
        top_k: only the k most likely tokens can be drawn; None for all.
        top_p: only the most likely tokens can be drawn that together have this probability, at least one (Holtzman et
            al., "The Curious Case of Neural Text Degeneration", 2019, https://arxiv.org/abs/1904.09751); None for all.
            It is applied after top_k.
        generator: random numbers, on the device of logits; None for the default generator.

    Raises:
        ValueError: temperature is negative, top_k below 1, or top_p not in (0, 1].
    """
    check_sampling(temperature, top_k, top_p)
    if temperature == 0.0:
        return logits.argmax(-1)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if top_k is not None and top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], float("-inf"))
    if top_p is not None and top_p < 1.0:
        ordered, places = scores.sort(-1, descending=True)
        likely = ordered.softmax(-1)
        before = likely.cumsum(-1) - likely  # the probability of all that are more likely
        unlikely = (before >= top_p).scatter(-1, places, before >= top_p)
        scores = scores.masked_fill(unlikely, float("-inf"))
    return torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(-1)
