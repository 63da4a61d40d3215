"""What a competent user writes without kernels: a plain decoder of Llama in the manner of gpt-fast, compiled.

Queries, keys and values are one product, caches are static, and one step is one CUDA graph of torch.compile's.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class PlainDecoder:
    """Decodes with a LlamaForCausalLM without biases, whose prompt goes through its own forward."""

    def __init__(self, model: Any, batch_size: int, max_length: int) -> None:
        self.model, config, head = model, model.config, model.lm_head.weight
        self.kv_heads, self.depth = config.num_key_value_heads, config.head_dim
        self.joined = [
            (torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]).detach(), torch.cat(pair).detach())
            for layer in model.model.layers
            for a in [layer.self_attn]
            for pair in [(layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight)]
        ]
        size = (batch_size, self.kv_heads, max_length, self.depth)
        self.caches = [(head.new_zeros(size), head.new_zeros(size)) for _ in model.model.layers]
        self.visible = torch.ones(max_length, max_length, dtype=torch.bool, device=head.device).tril()
        positions = torch.arange(max_length, device=head.device)[None]
        self.cos, self.sin = (table[0] for table in model.model.rotary_emb(head, positions))
        self.tokens = torch.zeros(batch_size, dtype=torch.int64, device=head.device)
        self.position = torch.zeros(1, dtype=torch.int64, device=head.device)
        # A graph reads and writes them where they are; it would copy others in each step, and not write them.
        kept = self.visible, self.cos, self.sin, self.tokens, self.position
        for tensor in (*kept, *itertools.chain(*self.joined, *self.caches)):
            torch._dynamo.mark_static_address(tensor)
        options = {**torch._inductor.list_mode_options("reduce-overhead"), "coordinate_descent_tuning": True}
        self._compiled = torch.compile(self._forward, fullgraph=True, options=options)

    @torch.no_grad()
    def start(self, input_ids: Tensor, attention_mask: Tensor) -> None:
        """Run a prompt without padding, and take its keys and values."""
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=True)
        layers = (out["cache"] if "cache" in out else out["past_key_values"]).layers
        for layer, (k, v) in zip(layers, self.caches, strict=True):
            k[:, :, : input_ids.shape[1]], v[:, :, : input_ids.shape[1]] = layer.keys, layer.values
        self.tokens.copy_(out.logits[:, -1].argmax(-1))
        self.position.fill_(input_ids.shape[1])

    @torch.no_grad()
    def step(self) -> None:
        """Run a step; `logits` and `tokens` are of the next token."""
        self.logits: Tensor = self._compiled(self.tokens, self.position)
        self.tokens.copy_(self.logits.argmax(-1))
        self.position.add_(1)

    def _forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        model = self.model.model
        x = F.embedding(tokens, model.embed_tokens.weight)[:, None]
        cos, sin, visible = self.cos[position], self.sin[position], self.visible[position]

        def turned(t: Tensor) -> Tensor:
            first, second = t.chunk(2, -1)
            return t * cos + torch.cat([-second, first], -1) * sin

        for layer, (qkv, gate_up), (k_cache, v_cache) in zip(model.layers, self.joined, self.caches, strict=True):
            heads = F.linear(layer.input_layernorm(x), qkv).unflatten(-1, (-1, self.depth)).transpose(1, 2)
            q, k, v = heads.split([heads.shape[1] - 2 * self.kv_heads, self.kv_heads, self.kv_heads], 1)
            k_cache[:, :, position], v_cache[:, :, position] = turned(k), v
            y = F.scaled_dot_product_attention(turned(q), k_cache, v_cache, attn_mask=visible, enable_gqa=True)
            x = x + layer.self_attn.o_proj(y.transpose(1, 2).flatten(2))
            gate, up = F.linear(layer.post_attention_layernorm(x), gate_up).chunk(2, -1)
            x = x + layer.mlp.down_proj(F.silu(gate) * up)
        return self.model.lm_head(model.norm(x))[:, 0]
