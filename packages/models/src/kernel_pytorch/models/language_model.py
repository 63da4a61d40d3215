"""`LanguageModel`: a decoder-only transformer in the architecture of Llama, with a loss, a cache and generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kernel_pytorch.qkv_fusion import RotaryTable

from .block import TransformerBlock
from .cache import KeyValueCache
from .loading import State, load_llama
from .sampling import check_sampling, sample
from .techniques import Names, TechniqueModule, check_integers

INITIAL_STD = 0.02
"""Standard deviation of new weights, as in GPT-2 and Llama."""


class LanguageModel(TechniqueModule):
    """A decoder-only transformer: RMSNorm, rotary embedding, grouped heads, gated feed-forward, tied embeddings.

    Parameters are `embedding.weight` `(V, dim)`, `blocks.N...` as in `TransformerBlock`, `norm.weight` `(dim,)`, and
    untied `head.weight` `(V, dim)`.

    Args:
        vocab_size: V.
        dim: channels of a token.
        num_layers: number of blocks.
        num_heads, num_kv_heads, head_dim: as in `Attention`.
        hidden_dim, activation: as in `FeedForward`.
        max_position: the most tokens of a sequence.
        rope_theta: base of the rotary frequencies.
        rope_scaling: None, or a mapping with `rope_type` "default", "linear" or "llama3" and its numbers, as in
            `kernel_pytorch.qkv_fusion.RotaryTable`.
        norm_eps: eps of all norms.
        attention_bias: whether the projections of attention have biases.
        tie_embeddings: whether the logits are computed with the weight of the embedding, as one shared parameter.
        techniques, level: as in `TechniqueModule`, with its errors.

    Source: Touvron et al., "LLaMA", 2023, https://arxiv.org/abs/2302.13971; "The Llama 3 Herd of Models", 2024,
    https://arxiv.org/abs/2407.21783.
    """

    join_sequence: Callable[[Tensor], Tensor] | None = None
    """Set by `distributed.tensor_parallel` where ranks divide the sequence."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        hidden_dim: int | None = None,
        max_position: int = 2048,
        rope_theta: float = 10000.0,
        rope_scaling: Mapping[str, Any] | None = None,
        norm_eps: float = 1e-6,
        activation: str = "silu",
        attention_bias: bool = False,
        tie_embeddings: bool = True,
        techniques: Names = None,
        level: str | None = None,
    ) -> None:
        super().__init__(techniques, level)
        check_integers(num_layers=num_layers)
        if num_layers < 1:
            raise ValueError(f"num_layers: given {num_layers}; it must be at least 1")
        sizes: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "hidden_dim": hidden_dim}
        sizes |= {"norm_eps": norm_eps, "activation": activation, "bias": attention_bias}
        how: dict[str, Any] = {"techniques": self.techniques.names, "level": level}
        self.max_position = max_position
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(TransformerBlock(dim, num_heads, **sizes, **how) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.head = None if tie_embeddings else nn.Linear(dim, vocab_size, bias=False)
        self.rotary = RotaryTable(head_dim or dim // num_heads, rope_theta, rope_scaling)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights: normal, and narrower where a block writes into the residual stream (GPT-2)."""
        narrow = INITIAL_STD / max(1, 2 * len(self.blocks)) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.constant_(parameter, float(name.endswith(("norm.weight", "norm1.weight", "norm2.weight"))))
            else:
                into_stream = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(parameter, std=narrow if into_stream else INITIAL_STD)

    @property
    def head_weight(self) -> nn.Parameter:
        """`(V, dim)`, the weight of the logits."""
        return self.embedding.weight if self.head is None else self.head.weight

    @classmethod
    def from_llama(
        cls, source: Any, state_dict: State = None, *, techniques: Names = None, level: str | None = None
    ) -> LanguageModel:
        """Load a Llama of transformers; the logits are the same. Dropout, if the configuration has any, is left out.

        Args:
            source: a `LlamaForCausalLM`, or its configuration: a `LlamaConfig` of transformers 4 or 5, or the content
                of its config.json.
            state_dict: of a `LlamaForCausalLM`; may be left out where source is a model. Tensors are copied, and the
                dtype is that of the embedding.
            techniques, level: as in the constructor.

        Raises:
            TypeError: source is a configuration, and there is no state_dict.
            ValueError: the configuration has something that is not supported (another rope_type, biases of the
                feed-forward, ...); tensors are missing, unknown or of other shapes; or embeddings that the
                configuration ties differ. The message has the names.
        """
        return load_llama(cls, source, state_dict, techniques=techniques, level=level)

    def forward(
        self,
        input_ids: Tensor,
        *,
        targets: Tensor | None = None,
        cache: KeyValueCache | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        logits_at: Tensor | None = None,
    ) -> Tensor:
        """Compute logits `(B, S, V)`, packed `(T, V)`, with logits_at `(B, V)`; or with targets their mean loss, `()`.

        Args:
            input_ids: `(B, S)`, integers; with cu_seqlens `(T,)`.
            targets: the shape of input_ids, the token that follows each, or -100 for tokens without a loss. With the
                technique linear-cross-entropy, and more than 4 dim words, the logits are then never held in memory.
            cache: of the tokens before input_ids, to which these are added: `new_cache` makes one. No gradients then:
                call it under `torch.no_grad()`.
            cu_seqlens: `(B + 1,)`, int32: input_ids are packed sequences, of which b is
                `input_ids[cu_seqlens[b] : cu_seqlens[b + 1]]`.
            max_seqlen: at least the tokens of the longest packed sequence; None for T, which is slower on a GPU.
            logits_at: `(B,)`, the token of each sequence to compute logits for; None for all tokens.

        Raises:
            ValueError: more tokens than max_position (not checked for packed sequences) or than the cache has room for,
                or arguments exclude each other.
        """
        self._check(input_ids, targets, cache, cu_seqlens, logits_at)
        positions = self._positions(input_ids, cache, cu_seqlens)
        rotation = self.rotary(positions)
        x, update = self.embedding(input_ids), None
        for index, block in enumerate(self.blocks):
            layer = None if cache is None else cache.layer(index, positions)
            how = {"rotation": rotation, "cache": layer, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
            x, update = block(x, update, defer=True, **how)
        if cache is not None:
            cache.advance(input_ids.shape[1])
        if logits_at is not None:
            rows = torch.arange(x.shape[0], device=x.device)
            x, update = x[rows, logits_at], None if update is None else update[rows, logits_at]
        x, _ = self.techniques.norm(self.norm, x, update)
        x = x if self.join_sequence is None else self.join_sequence(x)
        if targets is not None:
            return self.techniques.linear_cross_entropy(x, self.head_weight, targets)
        return self.techniques.logits(x, self.head_weight)

    def new_cache(self, batch: int, length: int | None = None) -> KeyValueCache:
        """Make an empty cache for batch sequences of length tokens (None: max_position), in the dtype of autocast."""
        first, weight = self.blocks[0].attention, self.embedding.weight
        device, dtype = weight.device, weight.dtype
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type)
        sizes = batch, first.num_kv_heads, self.max_position if length is None else length, first.head_dim
        return KeyValueCache(len(self.blocks), *sizes, device=device, dtype=dtype)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        lengths: Tensor | None = None,
        eos: int | Iterable[int] | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue texts, token by token; ValueError names an argument that does not fit.

        Args:
            input_ids: `(B, S)`, integers; shorter texts have padding at their end.
            max_new_tokens: the number of tokens that each text gets, fewer only where all have ended.
            lengths: `(B,)`, the number of tokens of each text without its padding, at least 1; None for S.
            eos: the token, or the tokens, that end a text; None for none.
            temperature, top_k, top_p, generator: as in `sample`; `temperature=0` for the most likely token.

        Returns:
            `(B, S + max_new_tokens)`: each text, its new tokens, and the first eos (0 without one) as padding.
        """
        sampling: Any = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "generator": generator}
        check_sampling(**sampling)
        _check_prompt(input_ids, max_new_tokens, lengths)
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
        cache = self.new_cache(batch, prompt + max_new_tokens)
        last = lengths - 1
        tokens = found[:, :prompt]
        for _ in range(max_new_tokens):
            logits = self(tokens, cache=cache, logits_at=last)
            if cache.filled == prompt:
                cache.set_lengths(lengths)  # the keys of padding are overwritten
            drawn = sample(logits, **sampling).masked_fill(finished, padding)
            found[rows, cache.lengths] = drawn.to(found.dtype)
            if len(ends):
                finished = finished | torch.isin(drawn, ends)
                if finished.all():
                    break
            tokens, last = drawn[:, None], torch.zeros_like(lengths)
        return found

    def _positions(self, input_ids: Tensor, cache: KeyValueCache | None, cu_seqlens: Tensor | None) -> Tensor:
        """`(S,)`, with a cache `(B, S)`: the position of each token in its sequence."""
        tokens = input_ids.shape[-1]
        if cache is not None:
            return cache.positions(tokens)
        places = torch.arange(tokens, device=input_ids.device)
        if cu_seqlens is None:
            return places
        return places - cu_seqlens[torch.searchsorted(cu_seqlens, places, right=True) - 1]

    def _check(self, input_ids: Tensor, targets: Any, cache: Any, cu_seqlens: Any, logits_at: Any) -> None:
        if input_ids.dim() != (2 if cu_seqlens is None else 1):
            wanted = "(B, S)" if cu_seqlens is None else "(T,), with cu_seqlens"
            raise ValueError(f"input_ids: shape is {tuple(input_ids.shape)}; it must be {wanted}")
        if targets is not None and targets.shape != input_ids.shape:
            raise ValueError(f"targets: shape is {tuple(targets.shape)}; it must be {tuple(input_ids.shape)}")
        if cache is not None and len(cache.lengths) != len(input_ids):
            raise ValueError(f"cache: it is for {len(cache.lengths)} sequences; input_ids has {len(input_ids)}")
        for name, given in (("cache", cache), ("logits_at", logits_at)):
            if given is not None and (targets is not None or cu_seqlens is not None or self.join_sequence is not None):
                raise ValueError(f"{name}: given with targets, cu_seqlens or a divided sequence; it must be None then, "
                                 "and a model with a divided sequence cannot generate")  # fmt: skip
        tokens = input_ids.shape[-1] + (0 if cache is None else cache.filled)
        if cu_seqlens is None and tokens > self.max_position:
            raise ValueError(f"input_ids: {tokens} tokens with those cached; max_position is {self.max_position}")


def _check_prompt(input_ids: Tensor, max_new_tokens: int, lengths: Tensor | None) -> None:
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids: shape is {tuple(input_ids.shape)}; it must be (B, S) with at least one token")
    check_integers(max_new_tokens=max_new_tokens)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: given {max_new_tokens}; it must be at least 1")
    if lengths is not None and lengths.shape != input_ids.shape[:1]:
        raise ValueError(f"lengths: shape is {tuple(lengths.shape)}; it must be ({input_ids.shape[0]},)")
    if lengths is not None and not bool(((lengths >= 1) & (lengths <= input_ids.shape[1])).all()):
        raise ValueError(f"lengths: given {lengths.tolist()}; they must be from 1 to {input_ids.shape[1]}")
