"""What this package can stand in for: `patch(model)` puts it there in place, `unpatch(model)` takes it off."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch

from ._core.patching import Patched, _check_model
from .decoder.checks import check_ends, check_prompt, check_sampling, why_not
from .decoder.decoder import ROWS, Decoder
from .decoder.families import Refused
from .decoder.miniature import recognise

STATE = "_kernel_pytorch_decoding"
"""Attribute of a patched model: its `Generated`, and its decoder."""
BY = "Decoder, in generate"
BLOCK = 256
"""A patched model's decoder has room for a multiple of this many tokens."""
WARPERS = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper")
CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
FORWARDED = ("attention_mask", "position_ids", "logits_to_keep", "cache", "past_key_values", "use_cache")
"""What transformers hands on by itself."""
LEFT = ("prefix_allowed_tokens_fn", "synced_gpus", "assistant_model", "negative_prompt_ids", "custom_generate",
        "negative_prompt_attention_mask", "inputs_embeds", "cache", "past_key_values")  # fmt: skip
"""Arguments of `generate` that leave it to transformers."""
OPTIONS = {
    "return_dict_in_generate": (None, False), "output_attentions": (None, False), "output_scores": (None, False),
    "output_hidden_states": (None, False), "output_logits": (None, False), "stop_strings": (None,),
    "use_cache": (None, True), "cache_implementation": (None, "dynamic", "static"), "token_healing": (None, False),
    "prefill_chunk_size": (None,),
}  # fmt: skip
"""Options of generation, and with which values the decoder can serve them."""


@dataclass
class Generated:
    """What became of the calls of a patched model's `generate`.

    Attributes:
        decoded: how many calls the decoder computed.
        left: by reason, how many calls transformers computed its own way.
    """

    decoded: int = 0
    left: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        """A line for the decoder, and one for each reason."""
        return "\n".join(
            [f"decoder: {_calls(self.decoded)}", *(f"transformers: {_calls(n)}, {r}" for r, n in self.left.items())]
        )


class _State:
    """What a patched model keeps; a copy of the model begins without a decoder."""

    def __init__(self) -> None:
        self.decoder: Decoder | None = None
        self.lock = threading.RLock()  # a call that needs more room closes the decoder of the others
        self.generated = Generated()

    def __reduce__(self) -> tuple[Any, ...]:
        return _State, ()

    def decoder_for(self, model: Any, rows: int, length: int) -> Decoder:
        """The decoder, with room for so many rows and tokens."""
        old = self.decoder
        if old is not None:
            old.check_idle()
        if old is not None and (old.is_outdated() or old.batch_size < rows or old.max_length < length):
            rows, length = max(rows, old.batch_size), max(length, old.max_length)
            self.close()
        if self.decoder is None:
            try:
                self.decoder = Decoder(model, rows, -(-length // BLOCK) * BLOCK)
            except Refused:  # whose angles change behind a position, between them
                self.decoder = Decoder(model, rows, length)
        return self.decoder

    def close(self) -> None:
        with self.lock:
            if self.decoder is not None:
                self.decoder.revert()
                self.decoder = None


def patch(model: torch.nn.Module) -> Patched:
    """Let a `Decoder` compute the steps of `generate`, in every causal model of transformers that it knows.

    `generate` prepares and checks everything as before. Greedy calls, and those that draw with temperature, top-k and
    top-p alone, then go on with the decoder, which is made at the first of them: it joins weights in place (see
    `Decoder`) and keeps its caches. All other calls, such as beams, penalties, scores or a cache of your own, run as
    without the patch, and `report(model)` says why. Nothing but `generate` changes: training, forward, names and
    classes stay, and a copy of the model is patched too; one that was pickled is not.

    Args:
        model: a model, or what holds one, before it is compiled.

    Returns:
        What was replaced, and why the rest was not.

    Raises:
        TypeError: `model` is no module, or is compiled or scripted.
    """
    _check_model(model)
    done = Patched()
    for path, module in model.named_modules():
        if not _generates(module):
            continue
        if _is_patched(module):
            done.replaced[path] = f"{BY}, patched before"
        elif getattr(module.__dict__.get("generate"), "__func__", type(module).generate) is not type(module).generate:
            done.left[path] = "its generate was replaced before by something else"
        elif "custom_generate" not in inspect.signature(type(module).generate).parameters:
            done.left[path] = "its generate takes no `custom_generate`, through which the decoder is called"
        else:
            try:
                recognise(module)
            except Refused as error:
                done.left[path] = str(error)
                continue
            module.__dict__[STATE] = _State()
            module.__dict__["generate"] = MethodType(_generate, module)
            done.replaced[path] = BY
    return done


def unpatch(model: torch.nn.Module) -> None:
    """Undo `patch`: the class's own `generate` again, and separate Parameters, bit for bit."""
    _check_model(model)
    for module in model.modules():
        if _is_patched(module):
            del module.__dict__["generate"]
            module.__dict__.pop(STATE).close()


def _calls(n: int) -> str:
    return "1 call" if n == 1 else f"{n} calls"


def report(model: torch.nn.Module) -> Generated:
    """What became of the calls of a patched model's `generate` so far.

    Raises:
        ValueError: the model is not patched.
    """
    if not isinstance(model, torch.nn.Module) or not _is_patched(model):
        raise ValueError(
            "model: its own generate is not patched; what patch(model) returns says why, and names parts that are: "
            "give one of them"
        )
    return model.__dict__[STATE].generated  # type: ignore[no-any-return]


def _is_patched(module: torch.nn.Module) -> bool:
    """Whether `generate` is ours; a model that was pickled comes back with that of its class."""
    return getattr(module.__dict__.get("generate"), "__func__", None) is _generate


def _generates(module: torch.nn.Module) -> bool:
    mixin = getattr(sys.modules.get("transformers.generation.utils"), "GenerationMixin", None)
    return mixin is not None and isinstance(module, mixin)


def _generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` of a patched model."""
    stock, state = type(self).generate, self.__dict__[STATE]
    bound = inspect.signature(stock).bind(self, *args, **kwargs)
    reason = _why_left(self, bound.arguments)
    if reason is not None:
        state.generated.left[reason] += 1
        return stock(self, *args, **kwargs)
    # transformers does not hand its streamer on to a callable.
    bound.arguments["custom_generate"] = functools.partial(_decode, streamer=bound.arguments.get("streamer"))
    return stock(*bound.args, **bound.kwargs)


_generate.__name__ = "generate"  # what pickle looks for


def _why_left(model: Any, arguments: dict[str, Any]) -> str | None:
    """Why transformers generates its own way, by what `generate` was given; None if the decoder may."""
    options = {**arguments.get("kwargs", {}), **arguments}
    given = next((name for name in LEFT if options.get(name) is not None), None)
    if given is not None:
        return f"{given} is given"
    try:
        config = model._prepare_generation_config(arguments.get("generation_config"), **arguments.get("kwargs", {}))[0]
        mode = config.get_generation_mode(None)
    except Exception as error:  # transformers raises it again
        return f"its arguments are refused: {error}"
    if mode not in ("greedy_search", "sample"):
        return f"the way of generation is {getattr(mode, 'value', mode)}"
    for name, allowed in OPTIONS.items():
        value = getattr(config, name, None)
        if not any(value is one or value == one for one in allowed):
            return f"{name} is {value!r}"
    return why_not(model)


def _decode(
    self: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
    streamer: Any = None, **model_kwargs: Any,
) -> Any:  # fmt: skip
    """What transformers calls when all is prepared: the decoder, or the class's own loop."""
    state = self.__dict__[STATE]
    with state.lock:
        return _decode_alone(
            self, state, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
        )


def _decode_alone(
    self: Any, state: _State, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
    streamer: Any, model_kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    try:
        choice = _choice(logits_processor, generation_config.do_sample)
        if choice is not None:
            check_sampling(choice["temperature"], choice["top_k"], choice["top_p"])
        criteria = _by_name(stopping_criteria, CRITERIA)
        ends = criteria["EosTokenCriteria"].eos_token_id.tolist() if "EosTokenCriteria" in criteria else []
        other = [name for name, value in model_kwargs.items() if name not in FORWARDED and value is not None]
        if other:
            raise ValueError(f"{other[0]} is given")
        new = operator.index(criteria["MaxLengthCriteria"].max_length) - input_ids.shape[1]
        mask = model_kwargs.get("attention_mask")
        pads = check_prompt(input_ids, mask, ROWS, self.get_input_embeddings().weight.shape[0])
        _check_positions(model_kwargs.get("position_ids"), input_ids.shape[1], pads)
        check_ends(ends)
        decoder = state.decoder_for(self, len(pads), input_ids.shape[1] + new)
    except (TypeError, ValueError, KeyError, RuntimeError) as error:  # no memory for the caches, among others
        state.generated.left[str(error)] += 1
        return type(self)._sample(
            self, input_ids, logits_processor, stopping_criteria, generation_config, streamer=streamer, **model_kwargs
        )
    state.generated.decoded += 1
    pad = generation_config._pad_token_tensor
    return decoder.run(input_ids, pads, new, ends, 0 if pad is None else int(pad), choice, streamer)


def _choice(processors: Any, sample: bool) -> dict[str, Any] | None:
    """What a draw needs, from the processors that transformers made."""
    found = _by_name(processors, WARPERS if sample else ())
    if not sample:
        return None
    temperature, top_k, top_p = (found.get(name) for name in WARPERS)
    if any(getattr(each, "filter_value", -torch.inf) != -torch.inf for each in found.values()):
        raise ValueError("a processor fills with another value than minus infinity")
    return {
        "temperature": 1.0 if temperature is None else temperature.temperature,
        "top_k": 0 if top_k is None else top_k.top_k,
        "top_p": 1.0 if top_p is None else top_p.top_p,
        "seed": None,
    }


def _by_name(found: Any, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Processors or criteria by the names of their classes.

    Raises:
        ValueError: there are others than the allowed ones, or they are not in this order.
    """
    names = [type(each).__name__ for each in found]
    own = all(type(each).__module__.startswith("transformers.") for each in found)
    if not own or names != [name for name in allowed if name in names]:
        others = [name for name in names if name not in allowed] or names
        raise ValueError(f"the step does not compute {', '.join(others)}")
    return dict(zip(names, found, strict=True))


def _check_positions(position_ids: Any, width: int, pads: list[int]) -> None:
    if position_ids is None:
        return
    expected = [[max(column - pad, 0) for column in range(width)] for pad in pads]
    if not position_ids.expand(len(pads), width).equal(torch.tensor(expected, device=position_ids.device)):
        raise ValueError("position_ids are others than the number of tokens before each")
