"""`sample` draws tokens from logits; `generate` continues texts with a language model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .language_model import LanguageModel


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
    """Draw one token for each row of logits.

    Args:
        logits: `(B, V)`, any float dtype.
        temperature: divides the logits; 0 takes the most likely token and draws nothing.
        top_k: only the k most likely tokens can be drawn; None for all.
        top_p: only the most likely tokens can be drawn that together have this probability, at least one (Holtzman et
            al., "The Curious Case of Neural Text Degeneration", 2019, https://arxiv.org/abs/1904.09751); None for all.
            It is applied after top_k.
        generator: random numbers, on the device of logits; None for the default generator.

    Returns:
        `(B,)`, int64.

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


@torch.no_grad()
def generate(
    model: LanguageModel,
    input_ids: Tensor,
    max_new_tokens: int,
    lengths: Tensor | None = None,
    eos: int | Iterable[int] | None = None,
    **sampling: Any,
) -> Tensor:
    """See `LanguageModel.generate`."""
    check_sampling(**sampling)
    _check(model, input_ids, max_new_tokens, lengths)
    batch, prompt = input_ids.shape
    ends = torch.tensor([] if eos is None else [eos] if isinstance(eos, int) else [*eos], device=input_ids.device)
    padding = int(ends[0]) if len(ends) else 0
    found = torch.cat((input_ids, input_ids.new_full((batch, max_new_tokens), padding)), 1)
    if lengths is None:
        lengths = input_ids.new_full((batch,), prompt)
    else:
        behind = torch.arange(found.shape[1], device=found.device) >= lengths[:, None]
        found = found.masked_fill(behind, padding)
    rows = torch.arange(batch, device=input_ids.device)
    finished = torch.zeros(batch, dtype=torch.bool, device=input_ids.device)
    cache = model.new_cache(batch, prompt + max_new_tokens)
    last = lengths - 1
    tokens = found[:, :prompt]
    for _ in range(max_new_tokens):
        logits = model(tokens, cache=cache, logits_at=last)
        if cache.filled == prompt:
            cache.set_lengths(lengths)  # the keys of padding are overwritten
        drawn = sample(logits, **sampling).masked_fill(finished, padding)
        found[rows, cache.lengths] = drawn
        if len(ends):
            finished = finished | torch.isin(drawn, ends)
            if finished.all():
                break
        tokens, last = drawn[:, None], torch.zeros_like(lengths)
    return found


def _check(model: LanguageModel, input_ids: Tensor, max_new_tokens: int, lengths: Tensor | None) -> None:
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids: shape is {tuple(input_ids.shape)}; it must be (B, S) with at least one token")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: given {max_new_tokens}; it must be at least 1")
    if lengths is not None and lengths.shape != input_ids.shape[:1]:
        raise ValueError(f"lengths: shape is {tuple(lengths.shape)}; it must be ({input_ids.shape[0]},)")
    if lengths is not None and not bool(((lengths >= 1) & (lengths <= input_ids.shape[1])).all()):
        raise ValueError(f"lengths: given {lengths.tolist()}; they must be from 1 to {input_ids.shape[1]}")
