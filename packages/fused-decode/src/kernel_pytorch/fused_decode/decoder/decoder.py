"""The Decoder."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.fused_decode._core.device import compute_capability

from . import plain
from .cache import Caches
from .checks import check_ends, check_model, check_pad, check_prompt, check_sampling, check_seed, end_tokens, why_not
from .families import Refused, tables
from .miniature import recognise
from .runner import Runner
from .sampling import CANDIDATES
from .step import Step
from .weights import Weights

ROWS = 16
LEVELS = ("native", "triton")


class Decoder:
    """Generates with a causal model of transformers, each token by one fused step.

    What `generate` is given decides, not the model's generation_config: of that, end and padding tokens count alone.

    Each token is one step over weights that are read once: queries, keys and values are one product, and so are gate
    and up of the gated unit. On a GPU the step is a CUDA graph. A prompt goes through the same layers, and through the
    model's own forward where attention has a soft cap or a window that is shorter than the prompt. A model is known by
    what its modules compute, which a trial on a miniature proves: Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, Phi-3,
    OLMo 2, SmolLM3 and what computes the same.

    Weights are joined in place: each of the model's Parameters becomes a part of a joined tensor, with the same name,
    values and a separate storage, so its state_dict saves and loads as before, and `revert` gives them separate memory
    again. Weights that are changed in place count; a model whose modules or Parameters were replaced (`to`,
    an adapter, `load_state_dict(assign=True)`) needs a new Decoder.

    Args:
        model: in evaluation, float16, bfloat16 or float32, all on one device.
        batch_size: how many sequences it can generate at once, from 1 to 16.
        max_length: tokens of a sequence at most, its prompt among them.
        level: "triton" for fused kernels, "native" for PyTorch's operators; None is "triton" on a GPU of compute
            capability 8.0 or newer, else "native".

    Raises:
        TypeError: the model is none that is computed here, with the reason; it is as before.
        ValueError: `batch_size`, `max_length` or `level` is none that is allowed, or cannot run here.
    """

    def __init__(self, model: Any, batch_size: int = 1, max_length: int = 2048, *, level: str | None = None) -> None:
        _check_sizes(batch_size, max_length)
        check_model(model)
        device = next(model.parameters()).device
        self.model, self.batch_size, self.max_length = model, batch_size, max_length
        self.level = level_on(device) if level is None else level
        operators, extra = _operators(self.level, device)
        self._lock = threading.RLock()
        self._room: int | None = None  # for further steps; None where nothing was started
        self._thread: int | None = None
        with torch.inference_mode(False), torch.no_grad():  # training may use the weights afterwards
            plan = recognise(model)
            angles = tables(model, plan.rotaries, max_length)
            self._weights: Weights | None = Weights(model, plan)
            try:
                caches = Caches(self._weights.plan, angles, batch_size, max_length)
                self._step = Step(self._weights.plan, caches, operators, extra)
                self._runner = Runner(self._step)
            except BaseException:
                self._weights.revert()
                raise

    def __repr__(self) -> str:
        """The model's class, the sizes and the level."""
        return (
            f"Decoder({type(self.model).__name__}, batch_size={self.batch_size}, max_length={self.max_length}, "
            f"level={self.level!r})"
        )

    def is_outdated(self) -> bool:
        """Whether the Decoder was reverted, or a Parameter of the model has other memory than when it was made."""
        return self._weights is None or self._weights.replaced() is not None

    def revert(self) -> None:
        """Separate the model's Parameters again, bit for bit; the Decoder cannot be used any more."""
        with self._lock:
            if self._weights is not None:
                self._runner.close()
                self._weights.revert()
                self._weights = None

    @torch.inference_mode(False)
    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 20,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 50,
        top_p: float = 1.0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        seed: int | None = None,
        streamer: Any = None,
    ) -> Tensor:
        """Go on from a prompt, with the tokens of transformers' `generate`; in 16 bits rounding decides near ties.

        Args:
            input_ids: int64 or int32 `(rows, columns)`, at most `batch_size` rows, padded at the left.
            attention_mask: `(rows, columns)`, 0 where a row is padded; None as in transformers: ones, or, where that
                can be inferred, what is not the padding token.
            max_new_tokens: tokens that are added at most.
            do_sample: whether tokens are drawn; else the one with the largest logit is taken, the lowest of several.
            temperature: above 0; the logits are divided by it.
            top_k: draw among this many of the largest, and those that equal the last of them; 0 for all.
            top_p: draw among the fewest tokens whose probabilities sum to this.
            eos_token_id: one or more tokens that end a row; None for those of the model's generation_config.
            pad_token_id: what follows the end of a row; None for that of the generation_config, or the first end token.
            seed: for the draws; None takes one from PyTorch's generator. Row, step and seed determine a draw, whatever
                the device and the other rows.
            streamer: gets the prompt, then the tokens of each step, as from transformers.

        Returns:
            int64 `(rows, columns + new)` on the device of `input_ids`.

        Raises:
            TypeError: an argument has another type or dtype; or the model changed, trains, or runs under autocast.
            ValueError: another argument is not as above; or a prompt is too long, is all padding, or has padding
                elsewhere than at the left.
            RuntimeError: the logits of a row are NaN or infinite, or the Decoder was reverted.
        """
        config = _generation_config(self.model, eos_token_id, pad_token_id)
        ends, mask = end_tokens(config.eos_token_id), self._mask(input_ids, attention_mask, config)
        pad = config.pad_token_id if config.pad_token_id is not None else next(iter(ends), 0)
        pads = self.check(input_ids, mask, max_new_tokens, ends, attention_mask is None)
        if do_sample:
            check_sampling(temperature, top_k, top_p)
            check_seed(seed)
        if streamer is not None:
            if not hasattr(streamer, "put") or not hasattr(streamer, "end"):
                raise TypeError(f"streamer: given {type(streamer).__name__}; it must have the methods put and end")
            streamer.put(input_ids.cpu())
        choice = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed} if do_sample else None
        return self.run(input_ids, pads, max_new_tokens, ends, pad, choice, streamer)

    def _mask(self, input_ids: Any, mask: Any, config: Any) -> Any:
        """The mask that was given, or the one that transformers makes of a prompt."""
        if mask is None and isinstance(input_ids, Tensor) and input_ids.dim() == 2 and len(input_ids):
            self.model._prepare_special_tokens(config, False, device=input_ids.device, batch_size=len(input_ids))
            mask = self.model._prepare_attention_mask_for_generation(input_ids, config, {})
        return mask

    def check_idle(self) -> None:
        """Raise ValueError within a call of this Decoder in this thread, which another call would disturb."""
        if self._thread == threading.get_ident():
            raise ValueError(
                "generate: it was called within a call of the same Decoder, such as by a streamer; make another one"
            )

    def check(self, input_ids: Any, mask: Any, new: Any, ends: Sequence[int], inferred: bool = False) -> list[int]:
        """Raise what `generate` raises before anything runs; how many columns of each row are padding."""
        if self._weights is None:
            raise RuntimeError("the Decoder was reverted; make a new one")
        self.check_idle()
        reason = why_not(self.model)
        if reason is None and (name := self._weights.replaced()) is not None:
            reason = f"{name} is not as it was when the Decoder was made; make a new Decoder"
        if reason is not None:
            raise Refused(f"{type(self.model).__name__}: {reason}")
        pads = check_prompt(input_ids, mask, self.batch_size, self._weights.plan.table.shape[0], inferred)
        if isinstance(new, bool) or not isinstance(new, int) or new < 1:
            raise ValueError(f"max_new_tokens: given {new!r}; it must be an integer, at least 1")
        width = input_ids.shape[1]
        if width >= self.max_length:
            raise ValueError(f"input_ids: {width} columns leave no room for a new token; the Decoder was made for "
                             f"max_length={self.max_length}; make one with more")  # fmt: skip
        if width + new > self.max_length:
            raise ValueError(f"max_new_tokens: a prompt of {width} and {new} new tokens are {width + new}; the Decoder "
                             f"was made for max_length={self.max_length}; make one with more")  # fmt: skip
        check_ends(ends)
        return pads

    @torch.inference_mode(False)
    @torch.no_grad()
    def run(
        self, input_ids: Tensor, pads: list[int], new: int, ends: Sequence[int], pad: int,
        choice: dict[str, Any] | None, streamer: Any = None,
    ) -> Tensor:  # fmt: skip
        """Generate from arguments that were checked; `choice` has what a draw needs, or is None."""
        with self._running():
            self._room = None
            step, runner, how = self._step, self._runner, _how(choice)
            runner.prepare(how)
            step.ends.fill_(-2)
            step.ends[: len(ends)] = torch.tensor(ends, dtype=torch.int64, device=step.ends.device)
            if choice is not None:
                seed, k = choice["seed"], choice["top_k"]
                seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu")) if seed is None else seed
                size = step.plan.table.shape[0]
                step.sampling.set(seed, choice["temperature"], min(k or size, size), choice["top_p"])
            try:
                step.choose(self._prompt(input_ids, pads), how)
                columns = self._columns(how, new, [input_ids.shape[1] - 1 - n for n in pads], {*ends}, pad, streamer)
            finally:
                step.caches.lengths.fill_(-1)
        added = torch.tensor(columns, dtype=torch.int64, device=input_ids.device).t()
        return torch.cat([input_ids, added], 1)  # int64 of int32 prompts too

    @property
    def tokens(self) -> Tensor:
        """The tokens that were chosen last, int64 `(batch_size,)`; the next step begins with what is here.

        The next step writes over them. The token is 0 where the logits of a row are NaN or infinite.
        """
        return self._step.tokens

    @property
    def logits(self) -> Tensor:
        """The logits of the last step or prompt, `(batch_size, vocabulary)`; the next step writes over them."""
        return self._step.last_logits

    @torch.inference_mode(False)
    @torch.no_grad()
    def start(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
        """Run a prompt, for steps of your own: `step()` then computes a greedy token of each row, without waiting.

        Both arguments and their errors are those of `generate`; no token ends a row, and a row whose logits are NaN or
        infinite is no error. The cache has room for `max_length` tokens, the first new one included.
        """
        mask = self._mask(input_ids, attention_mask, _generation_config(self.model, None, None))
        pads = self.check(input_ids, mask, 1, (), attention_mask is None)
        with self._running():
            self._runner.prepare("greedy")
            self._step.ends.fill_(-2)
            self._step.last_logits = self._prompt(input_ids, pads)
            self._step.choose(self._step.last_logits, "greedy")
            self._room = self.max_length - input_ids.shape[1]

    def step(self) -> None:
        """Compute the next token of each row after `start`; see `tokens` and `logits`.

        Raises:
            RuntimeError: nothing was started, all `max_length` slots are full, or the Decoder was reverted.
        """
        if self._weights is None:
            raise RuntimeError("the Decoder was reverted; make a new one")
        with self._lock:
            if self._room is None:
                raise RuntimeError("step: call start first")
            if self._room < 1:
                raise RuntimeError(f"step: all {self.max_length} slots are full, the max_length of the Decoder")
            self._room -= 1
            self._runner.run("greedy")

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Have the Decoder for this thread alone; a call within it is refused by `check`."""
        with self._lock:
            self._thread = threading.get_ident()
            try:
                yield
            finally:
                self._thread = None

    def _prompt(self, input_ids: Tensor, pads: list[int]) -> Tensor:
        """Compute the prompt's keys and values; the logits of the next token, `(batch_size, vocabulary)`."""
        step, (rows, width) = self._step, input_ids.shape
        device = step.tokens.device
        column, first = torch.arange(width, device=device), torch.tensor(pads, device=device)[:, None]
        tokens = input_ids.to(device, torch.int64)
        if any(pads):  # without the padding
            tokens = tokens.gather(1, (column + first).clamp_max(width - 1))
        found = self._runner.prompts.run(tokens, width - 1 - first[:, 0])
        if found is None:
            found = self._own_forward(input_ids.to(device), pads, column - first)
        step.caches.lengths.fill_(-1)
        step.caches.lengths[:rows] = (width - 1 - first[:, 0]).int()
        return F.pad(found, (0, 0, 0, self.batch_size - rows))

    def _own_forward(self, input_ids: Tensor, pads: list[int], positions: Tensor) -> Tensor:
        """The same by the model's own forward."""
        mask = (positions >= 0).long() if any(pads) else None
        out = self.model(
            input_ids=input_ids, attention_mask=mask, position_ids=positions.clamp_min(0), use_cache=True,
            logits_to_keep=1, return_dict=True,
        )  # fmt: skip
        self._step.caches.fill(out["cache"] if "cache" in out else out["past_key_values"], input_ids.shape[1], pads)
        logits: Tensor = out.logits[:, -1]
        return logits

    def _columns(
        self, how: str, new: int, first: list[int], ends: set[int], pad: int, streamer: Any
    ) -> list[list[int]]:
        """The new tokens, step by step, until every row has ended; `first` is the position of each row's first."""
        columns: list[list[int]] = []
        live, history = set(range(len(first))), self._step.caches.history
        for index in self._runner.steps(how, new):
            tokens = [int(history[row, at + index]) if row in live else pad for row, at in enumerate(first)]
            for row in live:
                if tokens[row] < 0:
                    raise RuntimeError(f"the logits of row {row} are NaN or infinite in step {index}")
            columns.append(tokens)
            if streamer is not None:
                streamer.put(torch.tensor(tokens, device="cpu"))
            live -= {row for row in live if tokens[row] in ends}
            if not live:
                break
        if streamer is not None:
            streamer.end()
        return columns


def _how(choice: dict[str, Any] | None) -> str:
    """How a step chooses, see `Step.choose`."""
    if choice is None:
        return "greedy"
    return "draw" if 0 < choice["top_k"] <= CANDIDATES else "draw from all"


def level_on(device: torch.device) -> str:
    """The level that None means."""
    if device.type == "cuda" and compute_capability(device) >= (8, 0) and importlib.util.find_spec("triton"):
        return "triton"
    return "native"


def _operators(level: str, device: torch.device) -> tuple[Any, dict[str, Any]]:
    if level not in LEVELS:
        raise ValueError(f"level: given {level!r}; allowed are {', '.join(map(repr, LEVELS))}")
    if level == "native":
        return plain, {}
    if importlib.util.find_spec("triton") is None:
        raise ValueError("level: given 'triton', which is not installed; pip install triton, or take 'native'")
    import triton

    from kernel_pytorch.fused_decode import launch

    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ValueError(
            f"level: given 'triton' for a model on {device}; move it to a GPU, or take 'native' (TRITON_INTERPRET=1 "
            "interprets kernels slowly on a CPU)"
        )
    pdl = device.type == "cuda" and compute_capability(device) >= (9, 0)
    return launch, {"workspace": launch.Workspace(device), "pdl": pdl}


def _check_sizes(batch_size: Any, max_length: Any) -> None:
    for name, value, most in (("batch_size", batch_size, ROWS), ("max_length", max_length, 2**31 - 1)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{name}: given {value!r}; it must be an integer from 1 to {most}")


def _generation_config(model: Any, eos_token_id: Any, pad_token_id: Any) -> Any:
    config = copy.deepcopy(model.generation_config)
    if eos_token_id is not None:
        config.eos_token_id = end_tokens(eos_token_id) or None
    if pad_token_id is not None:
        check_pad(pad_token_id)
        config.pad_token_id = pad_token_id
    return config
