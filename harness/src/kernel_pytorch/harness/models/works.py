"""The work that models do: a training step, the pass over a prompt, one more token after it, whole generations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernel_pytorch.harness.errors import named
from kernel_pytorch.harness.models.zoo import Model, Shape

ROOM = 1024
"""Tokens that are decoded at most: more than all rounds of a run need."""

Step = Callable[[], torch.Tensor]
"""Does the work once, and returns what shows that it was done right: the loss, or the logits."""


@dataclass(frozen=True)
class Work:
    """A kind of work."""

    name: str  # as in `--work`
    title: str  # for tables
    training: bool = False  # whether it has a backward and an optimizer
    autocast: bool = False  # whether weights are float32, and products run in bfloat16
    checkpointing: bool = False  # whether activations are computed again in the backward
    cached: bool = False  # whether tokens come one at a time, after a prompt in a cache
    batch: int | None = None  # sequences; None for those of the model's training step
    prompt: int | None = None  # tokens before those that are decoded; None for those of the model
    new: int = 0  # tokens that `generate` adds to the prompt; 0: the work is another
    whole: bool = False  # whether the model has all layers of the published one

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
    Work("decode-1-8k", "decode of 1 sequence after 8,192 tokens, static cache", cached=True, batch=1, prompt=8192),
    Work("decode-1-whole", "decode of 1 sequence, all published layers instead", cached=True, batch=1, whole=True),
    Work("generate", "generation of 256 tokens after 128", batch=1, prompt=128, new=256),
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


def step_of(
    work: Work, spec: Model, model: Any, call: Any, device: torch.device, *, mode: str | None = None,
    decodes: bool = False,
) -> Step:  # fmt: skip
    """The work as a function without arguments: `call` is the model after `prepare`, or what was made of it.

    `mode` is that of torch.compile, which transformers applies itself in a whole generation; with `decodes`, `call`
    makes a decoder of a model, see `PlainDecoder`.
    """
    if work.new:
        return _generation(work, spec, model, device, mode)
    if work.cached:
        return (_own_decoding if decodes else _decoding)(work, spec, model, call, device)
    inputs = spec.inputs(work.shape(spec), device)
    if work.training:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def train() -> Any:
            loss = _backward(work, call, inputs)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return train
    inputs.pop("labels")

    @torch.no_grad()
    def step() -> Any:
        return call(**inputs).logits

    return step


def _backward(work: Work, call: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss, after its backward."""
    with torch.autocast(inputs["labels"].device.type, torch.bfloat16, enabled=work.autocast):
        loss = call(**inputs).loss
    loss.backward()
    return loss.detach()


def gradients_of(work: Work, spec: Model, model: Any, call: Any, device: torch.device) -> torch.Tensor:
    """The norm of the gradient of each parameter, before anything is learned: what shows that training is right.

    At random weights the loss itself is near the logarithm of the vocabulary, whatever the layers compute.
    """
    _backward(work, call, spec.inputs(work.shape(spec), device))
    norms = [torch.zeros(()) if p.grad is None else p.grad.float().norm().cpu() for p in model.parameters()]
    model.zero_grad()
    return torch.stack(norms)


def _prompt(work: Work, spec: Model, model: Any, device: torch.device) -> tuple[torch.Tensor, int]:
    """Tokens `(batch, prompt)`, and how many there may be: `ROOM` more, or half of what a table of positions has."""
    positions = getattr(model.config, "n_positions", None)  # GPT-2 learns an embedding of each
    prompt, room = spec.prompt if spec.is_tiny or work.prompt is None else work.prompt, ROOM
    if positions is not None and prompt + room > positions:
        prompt, room = min(prompt, positions // 2), positions // 2
    return spec.inputs(Shape(work.batch or 1, prompt), device)["input_ids"], prompt + room


def elements_read(work: Work, spec: Model, model: Any) -> int:
    """How many numbers a decoded token cannot do without: each weight once, and keys and values of those before."""
    config, embedding, head = model.config, model.get_input_embeddings(), model.get_output_embeddings()
    weights = {p.data_ptr(): p.numel() for p in model.parameters()}
    if head.weight is not embedding.weight:  # of which a token reads one row
        weights.pop(embedding.weight.data_ptr())
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    depth = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    batch, before = _prompt(work, spec, model, torch.device("cpu"))[0].shape
    window = min(getattr(config, "sliding_window", None) or before, before)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    seen = sum(window if kind == "sliding_attention" else before for kind in kinds)
    return sum(weights.values()) + 2 * batch * seen * heads * depth


def _decoding(work: Work, spec: Model, model: Any, call: Any, device: torch.device) -> Step:
    """The next token after a prompt in a static cache: the last of the prompt, over and over."""
    from transformers import StaticCache

    tokens, most = _prompt(work, spec, model, device)
    names = inspect.signature(type(model).forward).parameters  # the name changed in transformers 5.24
    cache = StaticCache(config=model.config, max_cache_len=most)
    given = {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}
    with torch.no_grad():
        model(input_ids=tokens, **given)
    last = tokens[:, -1:].contiguous()

    @torch.no_grad()
    def step() -> Any:
        return call(input_ids=last, **given).logits

    return step


def _own_decoding(work: Work, spec: Model, model: Any, call: Any, device: torch.device) -> Step:
    """The same with a decoder, which chooses the next token too; it begins with the last token of the prompt."""
    tokens, most = _prompt(work, spec, model, device)
    decoder = call(model, batch_size=len(tokens), max_length=most)
    decoder.start(tokens, torch.ones_like(tokens))  # random tokens may be the one that pads
    decoder.tokens.copy_(tokens[:, -1])

    def step() -> Any:
        decoder.step()
        return decoder.logits[:, None]

    return step


def _generation(work: Work, spec: Model, model: Any, device: torch.device, mode: str | None) -> Step:
    """All tokens that `model.generate` makes of a prompt; no token ends them."""
    from transformers import CompileConfig

    tokens, _ = _prompt(work, spec, model, device)
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"max_new_tokens": 4 if spec.is_tiny else work.new, "do_sample": False}
    if mode is not None:
        options |= {"cache_implementation": "static", "compile_config": CompileConfig(mode=mode)}
    return functools.partial(model.generate, tokens, attention_mask=torch.ones_like(tokens), **options)


def result_of(work: Work, model: Any, found: torch.Tensor) -> torch.Tensor:
    """What shows that the work was done right.

    A generation gives, for each of its last tokens, 1 plus the distance of its logit from the largest, over the
    largest: rounding chooses among tokens that are nearly as likely, so generations themselves differ.
    """
    if not work.new:
        return found
    with torch.no_grad():
        logits = model(input_ids=found).logits[:, :-1].float()
    best = logits.amax(-1)
    return 1.0 + (best - logits.gather(-1, found[:, 1:, None])[..., 0])[:, -4:] / best.abs().max()
