"""The work that models do: a training step, the pass over a prompt, one more word after a prompt, whole generations."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernel_pytorch.harness.errors import named
from kernel_pytorch.harness.models.zoo import Model, Shape

ROOM = 1024
"""Words that are decoded at most: more than all rounds of a run need."""

Step = Callable[[], torch.Tensor]
"""Does the work once, and returns what shows that it was done right: the loss, or the logits."""


@dataclass(frozen=True)
class Work:
    """A kind of work.

    Attributes:
        name: as in `--work`.
        title: for tables.
        training: whether it has a backward and an optimizer.
        autocast: whether weights are float32, and products run in bfloat16.
        checkpointing: whether activations are computed again in the backward.
        cached: whether words come one at a time, after a prompt in a cache.
        batch: sequences; None for those of the model's training step.
        prompt: words before those that are decoded; None for those of the model.
        new: words that `generate` adds to the prompt; 0: the work is another.
        whole: whether the model has all layers of the published one.
    """

    name: str
    title: str
    training: bool = False
    autocast: bool = False
    checkpointing: bool = False
    cached: bool = False
    batch: int | None = None
    prompt: int | None = None
    new: int = 0
    whole: bool = False

    def applies(self, model: Model) -> bool:
        """Whether a model can do it: only causal models are decoded."""
        return model.kind == "causal" or not (self.cached or self.new or self.name == "token")

    def shape(self, model: Model) -> Shape:
        """The shape of the inputs."""
        return Shape(self.batch or model.training.batch, 1 if self.name == "token" else model.training.tokens)


WORKS = (
    Work("training", "training step", training=True),
    Work("autocast", "training step, autocast over float32 weights", training=True, autocast=True),
    Work("checkpointing", "training step, activation checkpointing", training=True, checkpointing=True),
    Work("prefill", "prefill"),
    Work("token", "one token, no cache", batch=1),
    Work("decode-1", "decode of 1 sequence, static cache", cached=True, batch=1),
    Work("decode-8", "decode of 8 sequences, static cache", cached=True, batch=8),
    Work("decode-1-8k", "decode of 1 sequence after 8,192 words, static cache", cached=True, batch=1, prompt=8192),
    Work("decode-1-whole", "decode of 1 sequence, all published layers", cached=True, batch=1, whole=True),
    Work("generate", "generation of 256 words after 128", batch=1, prompt=128, new=256),
)


def find_work(name: str) -> Work:
    """The work of that name. Raises UserError naming those that exist."""
    return named("work", name, {work.name: work for work in WORKS})


def prepare(work: Work, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Put a model, which is in float32 on the CPU, into the state that this work needs, before it is patched."""
    model = model.to(device, torch.float32 if work.autocast or device.type == "cpu" else torch.bfloat16)
    if work.checkpointing:
        enable_checkpointing(model)
    return model.train(work.training)


def enable_checkpointing(model: Any) -> None:
    """Let a model of transformers compute activations again; the newer name where it has it."""
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()


def gradients_of(work: Work, spec: Model, model: Any, call: Any, device: torch.device) -> torch.Tensor:
    """The norm of the gradient of each parameter, before anything is learned: what shows that training is right.

    At random weights the loss itself is near the logarithm of the vocabulary, whatever the layers compute.
    """
    with _context(work, device):
        loss = call(**spec.inputs(work.shape(spec), device)).loss
    loss.backward()
    norms = [torch.zeros(()) if p.grad is None else p.grad.float().norm().cpu() for p in model.parameters()]
    model.zero_grad()
    return torch.stack(norms)


def _context(work: Work, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if work.autocast else contextlib.nullcontext()


def step_of(
    work: Work, spec: Model, model: Any, call: Any, device: torch.device, *, mode: str | None = None,
    decodes: bool = False,
) -> Step:  # fmt: skip
    """The work as a function without arguments.

    Args:
        work: what is done.
        spec: what `model` is.
        model: after `prepare`, whose parameters are trained.
        call: what is called: the model, or what was made of it.
        device: where it is.
        mode: of torch.compile, which transformers applies itself in a whole generation.
        decodes: whether `call` makes a decoder of a model, see `PlainDecoder`.
    """
    if work.new:
        return _generation(work, spec, model, device, mode)
    if work.cached:
        return (_own_decoding if decodes else _decoding)(work, spec, model, call, device)
    inputs = spec.inputs(work.shape(spec), device)
    if work.training:
        return _training(work, model, call, inputs, device)
    inputs.pop("labels")

    @torch.no_grad()
    def step() -> Any:
        return call(**inputs).logits

    return step


def _training(work: Work, model: Any, call: Any, inputs: dict[str, torch.Tensor], device: torch.device) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> Any:
        with _context(work, device):
            loss = call(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _prompt(work: Work, spec: Model, model: Any, device: torch.device) -> tuple[torch.Tensor, int]:
    """Words `(batch, prompt)`, and how many there may be: `ROOM` more, or half of what a table of positions has."""
    positions = getattr(model.config, "n_positions", None)  # GPT-2 learns an embedding of each
    prompt, room = spec.prompt if spec.is_tiny or work.prompt is None else work.prompt, ROOM
    if positions is not None and prompt + room > positions:
        prompt, room = min(prompt, positions // 2), positions // 2
    return spec.inputs(Shape(work.batch or 1, prompt), device)["input_ids"], prompt + room


def elements_read(work: Work, spec: Model, model: Any) -> int:
    """How many numbers a decoded word cannot do without: each weight once, and keys and values of the words before."""
    config, embedding, head = model.config, model.get_input_embeddings(), model.get_output_embeddings()
    weights = {p.data_ptr(): p.numel() for p in model.parameters()}
    if head.weight is not embedding.weight:  # of which a word reads one row
        weights.pop(embedding.weight.data_ptr())
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    depth = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    batch, before = _prompt(work, spec, model, torch.device("cpu"))[0].shape
    window = min(getattr(config, "sliding_window", None) or before, before)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    seen = sum(window if kind == "sliding_attention" else before for kind in kinds)
    return sum(weights.values()) + 2 * batch * seen * heads * depth


def _decoding(work: Work, spec: Model, model: Any, call: Any, device: torch.device) -> Step:
    """The next word after a prompt in a static cache: the last of the prompt, over and over."""
    from transformers import StaticCache

    words, most = _prompt(work, spec, model, device)
    names = inspect.signature(type(model).forward).parameters  # the name changed in transformers 5.24
    cache = StaticCache(config=model.config, max_cache_len=most)
    cached = {"cache" if "cache" in names else "past_key_values": cache}
    with torch.no_grad():
        model(input_ids=words, **cached, use_cache=True)
    word = words[:, -1:].contiguous()

    @torch.no_grad()
    def step() -> Any:
        return call(input_ids=word, **cached, use_cache=True).logits

    return step


def _own_decoding(work: Work, spec: Model, model: Any, call: Any, device: torch.device) -> Step:
    """The same with a decoder, which chooses the next word too; it begins with the last word of the prompt."""
    words, most = _prompt(work, spec, model, device)
    decoder = call(model, batch_size=len(words), max_length=most)
    decoder.start(words, torch.ones_like(words))  # random words may be the one that pads
    decoder.tokens.copy_(words[:, -1])

    def step() -> Any:
        decoder.step()
        return decoder.logits[:, None]

    return step


def _generation(work: Work, spec: Model, model: Any, device: torch.device, mode: str | None) -> Step:
    """All words that `model.generate` makes of a prompt; no word ends them."""
    from transformers import CompileConfig

    words, _ = _prompt(work, spec, model, device)
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"max_new_tokens": 4 if spec.is_tiny else work.new, "do_sample": False}
    if mode is not None:
        options |= {"cache_implementation": "static", "compile_config": CompileConfig(mode=mode)}
    return functools.partial(model.generate, words, attention_mask=torch.ones_like(words), **options)


def result_of(work: Work, model: Any, found: torch.Tensor) -> torch.Tensor:
    """What shows that the work was done right.

    A generation gives, for each of its last words, 1 plus the distance of its logit from the largest, over the largest:
    rounding chooses among words that are nearly as likely, so generations themselves differ.
    """
    if not work.new:
        return found
    with torch.no_grad():
        logits = model(input_ids=found).logits[:, :-1].float()
    best = logits.amax(-1)
    return 1.0 + (best - logits.gather(-1, found[:, 1:, None])[..., 0])[:, -4:] / best.abs().max()
